"""Checks each request of a principal that is not trusted against the ACLs (Kafka's AclAuthorizer and AuthHelper).

Trusted are the principals in `super.users`, and brokers that have proved themselves by the cluster's secret. Without a
secret, brokers are principals like all others, and need `super.users` or ClusterAction on the cluster, as in Kafka.
"""

import logging
from collections.abc import Callable
from typing import Any

from minibroker.broker.security.access import Amendment, Inquiry, Known, check
from minibroker.broker.security.acl_store import AclStore
from minibroker.broker.security.table import ACCESS
from minibroker.protocol.apis import Api
from minibroker.protocol.messages import Message
from minibroker.protocol.principal import Principal

logger = logging.getLogger("minibroker.acls")

LOG_INTERVAL_S = 1.0


class AclAuthorizer:
    """Refusals are logged at most once per second by the clock `monotonic`."""

    def __init__(
        self,
        store: AclStore,
        super_users: frozenset[str],
        known: Known,
        monotonic: Callable[[], float],
        *,
        auto_creates_topics: bool,
    ) -> None:
        self.store = store
        self._super_users = super_users
        self._known = known
        self._monotonic = monotonic
        self._auto_creates_topics = auto_creates_topics
        self._log_after_s = 0.0

    def is_trusted(self, principal: Principal) -> bool:
        return principal.broker_id is not None or str(principal) in self._super_users

    def check(
        self,
        principal: Principal,
        host: str,
        api: Api[Any, Any],
        body: Any,
        remembered: dict[int, Inquiry],
        *,
        is_from_user: bool,
    ) -> Amendment | Message | None:
        """Return None if the principal may send this request; an Amendment if it may do so in part, of which `body` now
        has only that part; a Message if that is the answer. Raises BrokerError if the request is refused.

        `remembered` has the last inquiries of a connection, so that its next requests need not make new ones."""
        key = api.key if is_from_user else ~api.key
        inquiry = remembered.get(key)
        if inquiry is None or inquiry.sender is not principal or inquiry.bindings is not self.store.bindings:
            if not ACCESS[api.key] or self.is_trusted(principal):
                return None
            inquiry = remembered[key] = Inquiry(
                self.store.bindings,
                principal,
                host,
                api,
                self._known,
                is_from_user=is_from_user,
                auto_creates_topics=self._auto_creates_topics,
                note_refusal=self._note_refusal,
            )
        return check(ACCESS[api.key], inquiry, body)

    def _note_refusal(self, text: str) -> None:
        now_s = self._monotonic()
        if now_s >= self._log_after_s:
            self._log_after_s = now_s + LOG_INTERVAL_S
            logger.warning("%s", text)
