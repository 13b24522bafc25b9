"""The settings of listeners that use SASL: their mechanisms, and the users of PLAIN."""

from __future__ import annotations

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.model import uses_sasl
from minibroker.protocol.sasl.jaas import PLAIN_MODULE, JaasError, parse_jaas
from minibroker.protocol.sasl.mechanisms import MECHANISMS

_USER = "user_"


def sasl_mechanisms(own: BrokerConfig, listener: str) -> list[str]:
    """Return the mechanisms that a listener has enabled. `own` are its settings. Raises InvalidConfig."""
    names = [name.strip() for name in own.sasl_enabled_mechanisms.split(",") if name.strip()]
    for name in names:
        if name not in MECHANISMS:
            raise InvalidConfig(
                f"sasl.enabled.mechanisms of the listener {listener} has {name[:80]!r}: use {', '.join(MECHANISMS)}"
            )
    if not names:
        raise InvalidConfig(
            f"the listener {listener} uses SASL, but has no mechanism: set sasl.enabled.mechanisms to some of "
            f"{', '.join(MECHANISMS)}"
        )
    return list(dict.fromkeys(names))


def plain_users(own: BrokerConfig, listener: str) -> dict[str, str]:
    """Return the passwords of a listener's users, who are options of Kafka's PlainLoginModule. `own` are its settings.
    Raises InvalidConfig, which shows no password."""
    setting = f"listener.name.{listener.lower()}.plain.sasl.jaas.config"
    example = f'{PLAIN_MODULE} required user_alice="PASSWORD" ;'
    text = own.plain_sasl_jaas_config
    if text is None:
        raise InvalidConfig(f"the listener {listener} has PLAIN enabled, but no users: set {setting}={example}")
    try:
        module = parse_jaas(text)
    except JaasError as error:
        raise InvalidConfig(f"{setting}: {error}; for instance {example}") from None
    if module.name != PLAIN_MODULE:
        raise InvalidConfig(f"{setting} has another login module than {PLAIN_MODULE}: give {example}")
    users = {name.removeprefix(_USER): text for name, text in module.options.items() if name.startswith(_USER)}
    if not users or not all(users) or not all(users.values()):
        raise InvalidConfig(f"{setting} has no user, or one without a name or a password: give {example}")
    return users


def check_inter_broker(config: BrokerConfig) -> None:
    """Raise InvalidConfig if brokers could not prove themselves to each other."""
    name = config.inter_broker_listener
    if (
        uses_sasl(config.security_protocols()[name])
        and config.broker_secret_file is None
        and config.broker_secret is None
    ):
        raise InvalidConfig(
            f"other brokers connect to the listener {name}, which uses SASL, and no secret is set by which they prove "
            f"themselves there: set broker.secret.file, the same on all brokers, or name another listener in "
            f"inter.broker.listener.name"
        )


def jwks_url(own: BrokerConfig, listener: str) -> str:
    """Return where the keys of a listener's tokens are. `own` are its settings. Raises InvalidConfig."""
    url = own.sasl_oauthbearer_jwks_endpoint_url
    if url is None or not url.startswith(("http://", "https://", "file:/")):
        raise InvalidConfig(
            f"the listener {listener} has OAUTHBEARER enabled, but sasl.oauthbearer.jwks.endpoint.url is "
            f"{'unset' if url is None else repr(url[:80])}: give the URL of the keys that sign tokens, as "
            f"https://HOST/PATH or file:///PATH. Tokens without a signature are not accepted"
        )
    return url
