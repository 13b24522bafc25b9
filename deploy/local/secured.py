"""The files of a secured cluster (`minibroker up --secure`), and what its clients need.

In the data directory, readable by its owner alone:

    certificates/ca.pem, ca.key    the authority that clients trust, and its key
    certificates/broker.pem        the key and the certificate of all brokers, for this machine
    client.properties              the settings of clients as the user `admin`, a super user

All are made at the first time, and then stay: what is changed in them, or replaced, is used at the next start.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from minibroker.client.cli.terminal import security
from minibroker.client.security import Security
from minibroker.deploy.errors import LaunchError
from minibroker.deploy.local import certificates
from minibroker.deploy.local.certificates import Certificates
from minibroker.deploy.observing.access import Access, Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ALTER_USER_SCRAM_CREDENTIALS, DESCRIBE_USER_SCRAM_CREDENTIALS
from minibroker.protocol.errors import ErrorCode, MinibrokerError, error_of
from minibroker.protocol.sasl.scram import BY_NAME, LEAST_ITERATIONS, SALT_BYTES, salted_password

DIRECTORY = "certificates"
CLIENT_FILE = security.FILE_NAME
USER = "admin"
"""The first user, who may do everything."""
MECHANISM: Final = "SCRAM-SHA-256"
PROTOCOL = "SASL_SSL"
USER_TIMEOUT_S = 20.0
ASK_TIMEOUT_S = 5.0
PAUSE_S = 0.1

_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"


def make(directory: Path) -> None:
    """Make the files that do not exist yet. Raises LaunchError."""
    made_before = directory / DIRECTORY
    try:
        if not all((made_before / name).exists() for name in (certificates.AUTHORITY, certificates.BROKER)):
            Certificates(made_before)
        path = directory / CLIENT_FILE
        if not path.exists():
            _write(path, _properties(authority(directory), USER, secrets.token_urlsafe(24)))
    except OSError as error:
        raise LaunchError(f"{error.filename or directory} cannot be written: {error.strerror}") from error


def authority(directory: Path) -> Path:
    """Return the file with the certificate of the authority."""
    return directory / DIRECTORY / certificates.AUTHORITY


def settings(directory: Path) -> dict[str, str]:
    """Return the settings of each broker, without its listeners."""
    return {
        "ssl.keystore.location": str(directory / DIRECTORY / certificates.BROKER),
        "ssl.truststore.location": str(authority(directory)),
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
        "authorizer.class.name": "kafka.security.authorizer.AclAuthorizer",
        "super.users": f"User:{USER}",
        "allow.everyone.if.no.acl.found": "false",
    }


def credentials(directory: Path) -> Security:
    """Return the arguments of clients in `client.properties`. Raises InvalidSetting."""
    return security.read(directory / CLIENT_FILE)


async def make_user(directory: Path, addresses: Sequence[Address], access: Access) -> None:
    """Give the user of `client.properties` the password in it: the file may be new, or the password may have been
    changed elsewhere. Return when all brokers know the user. Raises LaunchError."""
    arguments = credentials(directory)
    user, password = _login(arguments)
    mechanism = BY_NAME.get(arguments.get("sasl_mechanism") or MECHANISM, BY_NAME[MECHANISM])
    salt = secrets.token_bytes(SALT_BYTES)
    try:
        hashed = salted_password(mechanism, password, salt, LEAST_ITERATIONS)
    except ValueError as error:
        raise LaunchError(f"{directory / CLIENT_FILE}: the password cannot be used: {error}") from error
    upsertion = m.ScramCredentialUpsertion(user, mechanism, LEAST_ITERATIONS, salt, hashed)
    problem = "no broker answers"
    is_set = False
    for _ in range(int(USER_TIMEOUT_S / PAUSE_S)):
        left = []
        for address in addresses:
            try:
                if not is_set:
                    code = await _set_password(access, address, upsertion)
                    is_set = code == ErrorCode.NONE
                if is_set:
                    code = await _ask_for_user(access, address, user)
                if code != ErrorCode.NONE:
                    problem = error_of(code).name
                    left.append(address)
            except MinibrokerError as error:
                problem = str(error)
                left.append(address)
        if not left:
            return
        await asyncio.sleep(PAUSE_S)
    raise LaunchError(f"the password of user {user} could not be set: {problem}; run `minibroker up --secure` again")


async def _ask_for_user(access: Access, address: Address, user: str) -> int:
    connection = await access.open(address, ASK_TIMEOUT_S)
    try:
        request = m.DescribeUserScramCredentialsRequest([m.ScramUserName(user)])
        answer = await connection.request(DESCRIBE_USER_SCRAM_CREDENTIALS, request, timeout_s=ASK_TIMEOUT_S)
    finally:
        connection.close()
    return answer.error_code or answer.results[0].error_code


async def _set_password(access: Access, address: Address, upsertion: m.ScramCredentialUpsertion) -> int:
    connection = await access.open(address, ASK_TIMEOUT_S)
    try:
        request = m.AlterUserScramCredentialsRequest([], [upsertion])
        answer = await connection.request(ALTER_USER_SCRAM_CREDENTIALS, request, timeout_s=ASK_TIMEOUT_S)
    finally:
        connection.close()
    return answer.results[0].error_code


def _login(arguments: Security) -> tuple[str, str]:
    user, password = arguments.get("sasl_plain_username"), arguments.get("sasl_plain_password")
    if not user or not password:
        raise LaunchError(f"{CLIENT_FILE} has no user with a password: remove it, and `minibroker up` makes another")
    return user, password


class Lines(NamedTuple):
    """What a user writes to connect one client."""

    client: str
    text: str


CLIENTS = ("minibroker", "librdkafka", "java", "kafka-python", "aiokafka")


def lines_for(directory: Path, bootstrap: str, arguments: Security) -> list[Lines]:
    """Return the lines for each client in CLIENTS with these credentials."""
    user, password = _login(arguments)
    ca = str(authority(directory))
    mechanism = arguments["sasl_mechanism"]
    python = {
        "security_protocol": PROTOCOL,
        "ssl_cafile": ca,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }
    librdkafka = {
        "bootstrap.servers": bootstrap,
        "security.protocol": PROTOCOL,
        "ssl.ca.location": ca,
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
    }
    of_aiokafka = {name: value for name, value in python.items() if name != "ssl_cafile"}
    context = f"    ssl_context=aiokafka.helpers.create_ssl_context(cafile={ca!r}),\n"
    return [
        Lines("minibroker", f"minibroker.sync.Producer(\n    {bootstrap!r},\n{_keywords(python)})\n"),
        Lines("librdkafka", "".join(f"{name}={value}\n" for name, value in librdkafka.items())),
        Lines("java", f"bootstrap.servers={bootstrap}\n{_properties(Path(ca), user, password, mechanism)}"),
        Lines("kafka-python", f"kafka.KafkaProducer(\n    bootstrap_servers={bootstrap!r},\n{_keywords(python)})\n"),
        Lines(
            "aiokafka",
            f"aiokafka.AIOKafkaProducer(\n    bootstrap_servers={bootstrap!r},\n{context}{_keywords(of_aiokafka)})\n",
        ),
    ]


def _keywords(arguments: Mapping[str, str]) -> str:
    return "".join(f"    {name}={value!r},\n" for name, value in arguments.items())


def _properties(authority: Path, user: str, password: str, mechanism: str = MECHANISM) -> str:
    return (
        f"security.protocol={PROTOCOL}\n"
        f"ssl.truststore.type=PEM\n"
        f"ssl.truststore.location={authority}\n"
        f"sasl.mechanism={mechanism}\n"
        f'sasl.jaas.config={_LOGIN} required username="{_quoted(user)}" password="{_quoted(password)}";\n'
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
