"""Configuration: frozen dataclasses to and from TOML, with nothing silently ignored.

A config is the frozen keyword-only dataclass of the thing it configures:

    @dataclass(frozen=True, kw_only=True)
    class Optimizer:
        lr: float = 1e-3

    @dataclass(frozen=True, kw_only=True)
    class Run:
        steps: int
        optimizer: Optimizer = field(default_factory=Optimizer)

    run = load(Run, Path("run.toml"), ["optimizer.lr=3e-4"])
    save(run, Path("resolved.toml"))  # load(Run, Path("resolved.toml")) == run

A table in the file changes only the keys it names; the others keep the field's own default.
Where a field may be one of several dataclasses, the keys of the table select one; or a tag does, a
field of the same name in each with a Literal of its own: `kind: Literal["lion"] = "lion"`.

msgspec checks and converts the values, but it drops the unknown keys of a dataclass, so the
dataclasses are built here, from the leaves up, and passed to msgspec as objects.

TOML has no null. A None is left out of the file, which is right where None is the default;
anywhere else it could not be read back, so `save` raises an error. A NaN is written and read as
`nan`, though like every NaN it then compares unequal to itself.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin
from typing import get_type_hints as type_hints

import msgspec
import tomli_w

from ingot.core.errors import ConfigError, UnknownName
from ingot.core.paths import write_atomic

T = TypeVar("T")
Keys = tuple[str | int, ...]

_MISSING = dataclasses.MISSING


def load(cls: type[T], path: Path | str | None = None, overrides: Sequence[str] = ()) -> T:
    """Build a `cls` from a TOML file and `dotted.key=value` overrides, the last one winning.

    The right side of an override is parsed as a TOML value, and taken as a string if it is not one.
    """
    path = None if path is None else Path(path)
    table = {} if path is None else _read(path)
    applied: list[tuple[Keys, str]] = []
    for text in overrides:
        keys, value = _parse_override(text)
        _apply_override(table, keys, value, text)
        applied.append((keys, text))
    return _Builder(path, tuple(applied)).build_dataclass(cls, table, (), None)


def dumps(config: object) -> str:
    """Return the config as TOML text from which `load` builds an equal config."""
    text = tomli_w.dumps(_to_table(config, (), None))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a string in the config is not valid Unicode: {error.object[error.start]!r}",
            hint="TOML is UTF-8; remove the lone surrogate (often an undecodable file name)",
        ) from error
    return text


def save(config: object, path: Path) -> None:
    """Write `dumps(config)` to `path` atomically."""
    write_atomic(path, dumps(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        what = f"cannot read config {path}: {error.strerror}"
        raise ConfigError(what, hint="check the path") from error
    except ValueError as error:  # TOMLDecodeError, which names the line, or not UTF-8
        raise ConfigError(f"{path} is not TOML: {error}", hint="correct that line") from error


def _parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split an override into its keys and value.

    >>> _parse_override("optimizer.lr=3e-4")
    (('optimizer', 'lr'), 0.0003)
    >>> _parse_override("name=my run")
    (('name',), 'my run')
    """
    left, equals, right = text.partition("=")
    try:
        table: Any = tomllib.loads(f"{left} = 0") if equals else {}
    except tomllib.TOMLDecodeError:
        table = {}
    if not table:
        raise ConfigError(f"cannot read override '{text}'", hint="write it as dotted.key=value")
    keys: list[str] = []
    while isinstance(table, dict):
        key, table = next(iter(cast(dict[str, Any], table).items()))
        keys.append(key)
    return tuple(keys), _parse_override_value(right)


def _parse_override_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    # Several keys: a multi-line string that happens to look like TOML.
    return table["value"] if len(table) == 1 else text.strip()


def _apply_override(table: dict[str, Any], keys: tuple[str, ...], value: Any, text: str) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        inner: Any = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"override '{text}' goes through {_dotted_key(keys[:depth])}, which is not a table",
                hint=f"set {_dotted_key(keys[:depth])} as a whole",
            )
        table = cast(dict[str, Any], inner)
    table[keys[-1]] = value


@dataclass(frozen=True)
class _Builder:
    """Builds dataclasses from tables; keeps the source of each value for error messages."""

    file: Path | None
    overrides: tuple[tuple[Keys, str], ...]

    def build_dataclass(self, cls: type[T], table: dict[str, Any], at: Keys, base: T | None) -> T:
        """Build `cls`; take keys missing in the table from `base`, or else from the defaults."""
        fields = _init_fields(cls)
        if unknown := [key for key in table if key not in fields]:
            here = (*at, unknown[0])
            where = f"key at {_dotted_key(here)} in {self.source(here)}:"
            raise UnknownName(where, unknown[0], fields)
        hints = type_hints(cls, include_extras=True)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            default = _default(field, base)
            if name in table:
                values[name] = self.build(hints[name], table[name], (*at, name), default)
            elif default is dataclasses.MISSING:
                raise self.missing((*at, name), hints[name])
            else:
                values[name] = default
        try:
            return cls(**values)
        except ValueError as error:
            where = f"{_dotted_key(at) or cls.__name__} in {self.source(at)}"
            raise ConfigError(f"{where}: {error}", hint="change the value") from error

    def build(self, annotation: Any, value: Any, at: Keys, default: Any) -> Any:
        """Build the dataclasses nested in `value`, then convert all of it with msgspec."""
        if isinstance(value, dict) and (
            arm := self.choose_dataclass(annotation, cast(dict[str, Any], value), at)
        ):
            base = default if type(default) is arm else None
            return self.build_dataclass(arm, cast(dict[str, Any], value), at, base)
        for arm in _union_members(annotation):
            if isinstance(value, dict) and _is_generic(arm, Mapping):
                items = cast(dict[str, Any], value).items()
                inner = get_args(arm)[1]
                value = {key: self.build(inner, v, (*at, key), None) for key, v in items}
            elif isinstance(value, list) and _is_generic(arm, Collection):
                elements = cast(list[Any], value)
                pairs = zip(_element_hints(arm, len(elements)), elements, strict=False)
                built = [self.build(h, v, (*at, i), None) for i, (h, v) in enumerate(pairs)]
                value = built + elements[len(built) :]
        try:
            return msgspec.convert(value, annotation, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise self.invalid(at, annotation, value, str(error)) from error

    def choose_dataclass(self, annotation: Any, table: dict[str, Any], at: Keys) -> type | None:
        """Choose the dataclass for a table; raise an error for an unknown tag."""
        arm = _choose_dataclass(annotation, table)
        for name, own in (_tags(arm) if arm else {}).items():
            if name in table and table[name] not in own:
                here = (*at, name)
                where = f"{_dotted_key(here)} in {self.source(here)}:"
                known = [
                    tag for other in _dataclasses(annotation) for tag in _tags(other).get(name, ())
                ]
                raise UnknownName(where, str(table[name]), known)
        return arm

    def source(self, at: Keys) -> str:
        """Return what set the value at `at`: one override, or the file and overrides inside it."""
        for keys, text in reversed(self.overrides):
            if at[: len(keys)] == keys:
                return f"override '{text}'"
        inside = [f"override '{text}'" for keys, text in self.overrides if keys[: len(at)] == at]
        return ", ".join([str(self.file), *inside] if self.file else inside) or "no config file"

    def missing(self, at: Keys, annotation: Any) -> ConfigError:
        """Return the error for a required field that is not set."""
        what = f"missing {_dotted_key(at)} (in {self.source(at)}): expected {_expected(annotation)}"
        return ConfigError(what, hint=f"set {_dotted_key(at)} in the file or as an override")

    def invalid(self, at: Keys, annotation: Any, value: Any, message: str) -> ConfigError:
        """Return the error for a value of the wrong type."""
        got = message.replace("`object`", "`table`")
        what = f"{_dotted_key(at)} in {self.source(at)}: {got[:1].lower()}{got[1:]}"
        hint = f"give it {_expected(annotation)}"
        if bool in _union_members(annotation):
            hint += ", written true or false"
        if type(None) in _union_members(annotation):
            hint += "; TOML has no null: leave the key out for None"
        if str in _union_members(annotation) and not isinstance(value, (dict, list)):
            hint += f"; if it is a string, quote it: {_dotted_key(at)}='\"{value}\"'"
        return ConfigError(what, hint=hint)


def _to_table(config: Any, at: Keys, base: Any) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, field in _init_fields(config).items():
        value, default = getattr(config, name), _default(field, base)
        if value is not None or default is not None:
            table[name] = _to_toml(value, (*at, name), default)
    return table


def _to_toml(value: Any, at: Keys, default: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _to_table(value, at, default if type(default) is type(value) else None)
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: _to_toml(v, (*at, key), None) for key, v in items}
    if isinstance(value, (list, tuple)):
        elements = cast(Sequence[Any], value)
        return [_to_toml(v, (*at, i), None) for i, v in enumerate(elements)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if value is None:
        raise ConfigError(
            f"{_dotted_key(at)} is None, which TOML cannot express and which is not its default",
            hint="make None the default of the field, or give it another value",
        )
    return value


def _init_fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config) if field.init}


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    """Return the value of a field that no file sets: MISSING if it is required."""
    if base is not None:
        return getattr(base, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _union_members(annotation: Any) -> list[Any]:
    """Flatten unions and Annotated into the plain types a value may have.

    >>> _union_members(int | None)
    [<class 'int'>, <class 'NoneType'>]
    """
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for member in get_args(annotation) for arm in _union_members(member)]
    return [annotation]


def _choose_dataclass(annotation: Any, table: dict[str, Any]) -> type | None:
    """Return the dataclass of a union whose fields fit the keys of a table best.

    >>> @dataclass
    ... class Point:
    ...     x: int
    >>> @dataclass
    ... class Box:
    ...     x: int
    ...     width: int
    >>> _choose_dataclass(Box | Point | None, {"x": 1}).__name__
    'Point'
    """

    def misfits(arm: Any) -> int:
        fields = _init_fields(arm)
        required = {name for name, field in fields.items() if _default(field, None) is _MISSING}
        wrong = [name for name, own in _tags(arm).items() if table.get(name, own[0]) not in own]
        # A tag decides, whatever the other keys are.
        return 1000 * len(wrong) + len(table.keys() - fields.keys()) + len(required - table.keys())

    return min(_dataclasses(annotation), key=misfits, default=None)


def _dataclasses(annotation: Any) -> list[Any]:
    return [
        a for a in _union_members(annotation) if isinstance(a, type) and dataclasses.is_dataclass(a)
    ]


def _tags(arm: Any) -> dict[str, tuple[Any, ...]]:
    """Return the fields whose type is a Literal with one value, and that value."""
    hints = type_hints(arm, include_extras=True)
    literal = {
        name: get_args(hints[name]) for name in _init_fields(arm) if _is_literal(hints[name])
    }
    return {name: values for name, values in literal.items() if len(values) == 1}


def _is_literal(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


def check_bounds(config: object, **bounds: tuple[float, float]) -> None:
    """Raise an error unless each named field of a config is a number within its bounds.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     lr: float
    ...     def __post_init__(self) -> None:
    ...         check_bounds(self, lr=(0.0, 10.0))
    >>> Optimizer(lr=-1.0)
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: Optimizer.lr: expected a number from 0.0 to 10.0, got -1.0
      hint: give a number from 0.0 to 10.0
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if not (isinstance(value, int | float) and low <= value <= high):
            expected = f"a number from {low} to {high}"
            raise ConfigError(
                f"{type(config).__name__}.{name}: expected {expected}, got {value!r}"[:200],
                hint=f"give {expected}",
            )


def _is_generic(annotation: Any, base: type) -> bool:
    origin = get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, base)


def _element_hints(annotation: Any, count: int) -> Sequence[Any]:
    args = get_args(annotation)
    if get_origin(annotation) is tuple and args[-1:] != (Ellipsis,):
        return args
    return args[:1] * count


def _decode(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise ValueError(f"expected `{kind.__name__}`, got `{type(value).__name__}`")


def _expected(annotation: Any) -> str:
    """Return a description of a type for users.

    >>> _expected(Literal["adam", "muon"]), _expected(int | None)
    ("one of 'adam', 'muon'", 'int | None')
    """
    choices: list[Any] = []
    for arm in _union_members(annotation):
        if get_origin(arm) is Literal:
            choices += get_args(arm)
        elif isinstance(arm, type) and issubclass(arm, Enum):
            choices += [member.value for member in arm]
    if choices:
        return "one of " + ", ".join(map(repr, choices))
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _dotted_key(at: Keys) -> str:
    """Return the key of a value as an override would spell it.

    >>> _dotted_key(("groups", "a.b", 0, "lr"))
    'groups."a.b"[0].lr'
    """
    parts = [f"[{key}]" if isinstance(key, int) else f".{_bare_or_quoted(key)}" for key in at]
    return "".join(parts).removeprefix(".")


def _bare_or_quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
