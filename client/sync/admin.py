"""The blocking admin client: the methods of the asynchronous one, each of which waits for its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from minibroker.client.admin import Admin as AsyncAdmin
from minibroker.client.administering.timeline import TimelineRead
from minibroker.client.administering.timeline import TimelineReader as AsyncTimelineReader
from minibroker.client.other_names import knows_other_names
from minibroker.client.security import Security
from minibroker.client.sync.facade import Facade, blocking


class Admin(Facade[AsyncAdmin]):
    """Administration, from any thread. Use it as `with Admin("host:9092") as admin`, or call `start` and `close`.

    Guarantees, settings and errors are those of `minibroker.Admin`. A call that is interrupted (Ctrl-C) may still take
    effect. After a fork every call in the child except `close` raises ForkedClient; `close` does nothing there. The
    constructor raises InvalidSetting.
    """

    _noun = "admin client"

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str = "minibroker-admin",
        request_timeout_ms: float = 30_000,
        default_api_timeout_ms: float = 60_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 300_000,
        **security: Unpack[Security],
    ) -> None:
        super().__init__(
            AsyncAdmin(
                bootstrap,
                client_id=client_id,
                request_timeout_ms=request_timeout_ms,
                default_api_timeout_ms=default_api_timeout_ms,
                retry_backoff_ms=retry_backoff_ms,
                metadata_max_age_ms=metadata_max_age_ms,
                **security,
            )
        )

    create_topic = blocking(AsyncAdmin.create_topic)
    create_topics = blocking(AsyncAdmin.create_topics)
    create_partitions = blocking(AsyncAdmin.create_partitions)
    delete_topic = blocking(AsyncAdmin.delete_topic)
    delete_topics = blocking(AsyncAdmin.delete_topics)
    list_topics = blocking(AsyncAdmin.list_topics)
    describe_topic = blocking(AsyncAdmin.describe_topic)
    describe_topics = blocking(AsyncAdmin.describe_topics)

    describe_cluster = blocking(AsyncAdmin.describe_cluster)
    describe_log_dirs = blocking(AsyncAdmin.describe_log_dirs)
    create_acls = blocking(AsyncAdmin.create_acls)
    describe_acls = blocking(AsyncAdmin.describe_acls)
    delete_acls = blocking(AsyncAdmin.delete_acls)
    describe_user_scram_credentials = blocking(AsyncAdmin.describe_user_scram_credentials)
    alter_user_scram_credentials = blocking(AsyncAdmin.alter_user_scram_credentials)
    timeline = blocking(AsyncAdmin.timeline)

    def timeline_reader(self, since_ms: int = 0) -> TimelineReader:
        """Return a reader whose first `read` returns the same as `timeline`, and each later one what is new."""
        return TimelineReader(self, self._client.timeline_reader(since_ms))

    describe_configs = blocking(AsyncAdmin.describe_configs)
    incremental_alter_configs = blocking(AsyncAdmin.incremental_alter_configs)

    describe_client_quotas = blocking(AsyncAdmin.describe_client_quotas)
    alter_client_quotas = blocking(AsyncAdmin.alter_client_quotas)

    delete_records = blocking(AsyncAdmin.delete_records)
    list_offsets = blocking(AsyncAdmin.list_offsets)

    list_groups = blocking(AsyncAdmin.list_groups)
    describe_groups = blocking(AsyncAdmin.describe_groups)
    delete_groups = blocking(AsyncAdmin.delete_groups)
    remove_group_members = blocking(AsyncAdmin.remove_group_members)
    list_group_offsets = blocking(AsyncAdmin.list_group_offsets)
    alter_group_offsets = blocking(AsyncAdmin.alter_group_offsets)
    delete_group_offsets = blocking(AsyncAdmin.delete_group_offsets)

    list_transactions = blocking(AsyncAdmin.list_transactions)
    describe_transactions = blocking(AsyncAdmin.describe_transactions)
    describe_producers = blocking(AsyncAdmin.describe_producers)
    fence_producers = blocking(AsyncAdmin.fence_producers)
    abort_transaction = blocking(AsyncAdmin.abort_transaction)

    alter_partition_reassignments = blocking(AsyncAdmin.alter_partition_reassignments)
    list_partition_reassignments = blocking(AsyncAdmin.list_partition_reassignments)
    elect_leaders = blocking(AsyncAdmin.elect_leaders)


class TimelineReader:
    """Reads the timelines of all brokers, and then what is new in them, through an admin client."""

    def __init__(self, admin: Admin, reader: AsyncTimelineReader) -> None:
        self._admin = admin
        self._reader = reader

    def read(self) -> TimelineRead:
        """Return the entries that are new since the last call, of the brokers that answer. Raises NetworkError if none
        does."""
        return self._admin._call(self._reader.read)
