"""Reads the tables of settings: the names, types, rules, defaults and documentation of their fields."""

import ast
import functools
import inspect
import textwrap
from typing import Any

import msgspec

from minibroker.broker.settings.types import UNBOUNDED, kafka_name
from minibroker.broker.settings.units import unit_of
from minibroker.protocol.model import ConfigType

LISTS = frozenset(
    {
        "cleanup.policy",
        "log.cleanup.policy",
        "leader.replication.throttled.replicas",
        "follower.replication.throttled.replicas",
    }
)


@functools.cache
def fields(schema: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(schema)  # cached, because msgspec resolves the annotations on each call


@functools.cache
def known_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in fields(schema))


@functools.cache
def integer_names(schema: type[msgspec.Struct]) -> list[str]:
    """Return the names of the settings that are whole numbers."""
    return [field.encode_name for field in fields(schema) if _is_integer(field.type)]


@functools.cache
def trimmed_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of the settings whose values are stripped of blanks (Kafka's ConfigDef.parseType)."""
    names = (field.encode_name for field in fields(schema))
    return frozenset(name for name in names if config_type(schema, name) is not ConfigType.STRING)


def _is_integer(kind: Any) -> bool:
    return any(isinstance(choice, msgspec.inspect.IntType) for choice in _choices(kind))


def _choices(kind: Any) -> tuple[msgspec.inspect.Type, ...]:
    """Return the possible types of a setting's values: several if it may be unset."""
    info = msgspec.inspect.type_info(kind)
    return info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)


def rule_of(schema: type[msgspec.Struct], name: str) -> str:
    """Return the values that a setting accepts, in words."""
    unit = unit_of(name)
    of_unit = "" if unit is None else f", in {unit}"
    for choice in _choices(next(f.type for f in fields(schema) if f.encode_name == name)):
        match choice:
            case msgspec.inspect.IntType(ge=least, le=most) if most == UNBOUNDED:
                return f"a whole number, {least} or more{of_unit}"
            case msgspec.inspect.IntType(ge=least, le=most):
                return f"a whole number from {least} to {most}{of_unit}"
            case msgspec.inspect.LiteralType(values=values):
                return " or ".join(map(str, values))
            case msgspec.inspect.FloatType(ge=least, le=None):
                return f"a number from {least:g} on"
            case msgspec.inspect.FloatType(ge=least, le=most):
                return f"a number from {least:g} to {most:g}"
            case msgspec.inspect.BoolType():
                return "true or false"
            case msgspec.inspect.Metadata(extra_json_schema={"description": str(rule)}):
                return rule
    return "any text"


def accepts(schema: type[msgspec.Struct], name: str, number: int) -> bool:
    """Return whether a number is within the bounds of a setting that is a whole number."""
    try:
        msgspec.convert(number, next(f.type for f in fields(schema) if f.encode_name == name))
    except msgspec.ValidationError:
        return False
    return True


@functools.cache
def config_type(schema: type[msgspec.Struct], name: str) -> ConfigType:
    """Return the type of a setting in the protocol's terms."""
    if name in LISTS:
        return ConfigType.LIST
    for choice in _choices(next(f.type for f in fields(schema) if f.encode_name == name)):
        match choice:
            case msgspec.inspect.IntType(le=most):
                return ConfigType.INT if most is not None and most < 2**31 else ConfigType.LONG
            case msgspec.inspect.FloatType():
                return ConfigType.DOUBLE
            case msgspec.inspect.BoolType():
                return ConfigType.BOOLEAN
    return ConfigType.STRING


@functools.cache
def documentation(schema: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each setting by its name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    found[kafka_name(field.target.id)] = " ".join(said.split())
    return found


def as_texts(config: msgspec.Struct) -> dict[str, str]:
    """Return the settings as text, without those that are unset and those of single listeners."""
    values = ((field.encode_name, getattr(config, field.name)) for field in fields(type(config)))
    return {name: _as_text(value) for name, value in values if value is not None and not isinstance(value, dict)}


def default_texts(schema: type[msgspec.Struct]) -> dict[str, str]:
    """Return the defaults as text, without settings that have none."""
    return {
        field.encode_name: _as_text(field.default)
        for field in fields(schema)
        if field.default is not msgspec.NODEFAULT and field.default is not None
    }


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
