"""Login modules in Kafka's sasl.jaas.config."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.protocol.sasl.jaas import JaasError, parse_jaas

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"


def test_a_module_has_its_name_and_options() -> None:
    found = parse_jaas(f'{SCRAM} required username="alice" password="a b;=c" ;')
    assert found.name == "ScramLoginModule"
    assert found.options == {"username": "alice", "password": "a b;=c"}


def test_options_may_be_on_lines_of_their_own_and_without_quotes() -> None:
    found = parse_jaas("PlainLoginModule required\n    username=alice\n    password='x\"y';\n")
    assert found.options == {"username": "alice", "password": 'x"y'}


def test_quotes_within_a_value_are_escaped() -> None:
    assert parse_jaas(r'M required password="a\"b\\c";').options == {"password": 'a"b\\c'}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "MODULE required"),
        ('M username="secret";', "MODULE required"),
        ('M required username="secret"', "semicolon"),
        ('M required username "secret";', "option 1 is not NAME"),
        ('M required a="secret" b=;', "option 2 is not NAME"),
        ('M required a="secret" a="secret";', "option 2 has the name of an earlier one"),
        ('M required a="secret;', "quotation mark"),
    ],
)
def test_an_error_names_the_rule_and_never_the_text(text: str, rule: str) -> None:
    with pytest.raises(JaasError, match=rule) as failed:
        parse_jaas(text)
    assert "secret" not in str(failed.value)


def test_a_module_does_not_show_its_options() -> None:
    assert "secret" not in repr(parse_jaas('M required password="secret";'))


@given(st.dictionaries(st.from_regex(r"[a-z_.]{1,9}", fullmatch=True), st.text(max_size=20), max_size=4))
def test_every_text_can_be_a_value(options: dict[str, str]) -> None:
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in options.items()}
    text = " ".join(f'{name}="{value}"' for name, value in quoted.items())
    assert parse_jaas(f"M required {text};").options == options


@given(st.text(max_size=60))
def test_any_text_is_a_module_or_an_error(text: str) -> None:
    with suppress(JaasError):
        parse_jaas(text)
