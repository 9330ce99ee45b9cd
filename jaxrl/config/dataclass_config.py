"""What every config class has: strict construction from nested values, hashing, static pytree."""

import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeGuard, TypeVar, cast

import yaml

from jaxrl.config_error import ConfigError, UnknownField, fail
from jaxrl.pytrees import register_static

Config = TypeVar("Config", bound="BaseConfig")
SHOWN = 12  # fields of a config that the error of an unknown one names


class Text(str):
    """Hold a value as typed on a command line; converted by the type of the field it is for."""


@dataclasses.dataclass(frozen=True)
class TakesObjects:
    """Say in an `Annotated` that a field takes objects in place of names; see `given`.

    Attributes:
        named: is called with what the user gave and the dotted name of the field; returns it with
            every object replaced by its name.
    """

    named: Callable[[Any, str], Any]


class BaseConfig:
    """Serve as base of all config classes. Derive with `@dataclass`; defaults on every field."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # In the class's own __dict__, or @dataclass, which runs later, would set __hash__ to None.
        cls.__hash__ = BaseConfig.__hash__
        # A config is part of the program, not of its data: jit compiles once per distinct value.
        register_static(cls)

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, _hashable(field_values(self))))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; a misspelt one would otherwise be set beside it in silence.

        What is no field: properties, and names that begin with an underscore.
        """
        cls = type(self)
        known = name in cls.__dataclass_fields__ or name[:1] == "_"  # type: ignore[attr-defined]
        if not known and not inspect.isdatadescriptor(getattr(cls, name, None)):
            try:
                check_field(cls, name, "")
            except ValueError as error:
                rule = "an attribute that is no field begins with '_'"
                raise AttributeError(f"{error}; {rule}") from None
        super().__setattr__(name, value)

    @classmethod
    def from_dict_config(cls, cfg: Any) -> Self:
        """Make a config from nested values, over the defaults; what is not given keeps its default.

        Args:
            cfg: a nested dict, ml_collections.ConfigDict, or OmegaConf DictConfig.

        Raises:
            ValueError: unknown key or wrong type; the message has the dotted path and the fix.
        """
        return _merged(cls, cfg, "", None)


def checked(config: Config, path: str = "") -> Config:
    """Return a copy of a config, each value as one of the type of its field.

    The values may have been set one by one.

    Raises:
        ValueError: a value is not one; names the field and what it takes.
    """
    config, kinds = copy.copy(config), field_types(type(config))
    for name, value in field_values(config).items():
        at = _join(path, name)
        fits = is_config(value) and isinstance(value, config_class(kinds[name]) or BaseConfig)
        new = checked(value, at) if fits else convert_field(type(config), name, value, at)
        setattr(config, name, copy.deepcopy(new))
    return config


def is_config(value: Any) -> TypeGuard[BaseConfig]:
    """Return whether `value` is a config instance."""
    return isinstance(value, BaseConfig)


def config_classes(config: BaseConfig) -> list[type[BaseConfig]]:
    """Return the class of a config, and those of the configs in it."""
    inner = [config_classes(value) for value in vars(config).values() if is_config(value)]
    return [type(config), *(found for classes in inner for found in classes)]


def field_values(config: BaseConfig) -> dict[str, Any]:
    """Return a config as field name -> value, one level deep."""
    return {f.name: getattr(config, f.name) for f in _fields(config)}


def flatten(config: BaseConfig, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of every leaf; a dict-typed field is one leaf."""
    leaves = {}
    for name, value in field_values(config).items():
        if is_config(value):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


@functools.cache
def field_types(cls: type[BaseConfig]) -> Mapping[str, Any]:
    """Return field name -> type, with annotations that are strings resolved."""
    hints = typing.get_type_hints(cls)
    return types.MappingProxyType({f.name: hints[f.name] for f in _fields(cls)})


@functools.cache
def field_markers(cls: type[BaseConfig]) -> dict[str, tuple[Any, ...]]:
    """Return field name -> what `Annotated` adds to its type: constraints, what it is in SkyRL.

    What a class says of a field also holds in those made of it, which add to it.
    """
    markers = {f.name: () for f in _fields(cls)}
    for base in reversed(cls.__mro__):
        for name in inspect.get_annotations(base).keys() & markers:
            kind = typing.get_type_hints(base, include_extras=True)[name]
            markers[name] += getattr(kind, "__metadata__", ())
    return markers


def is_union(kind: Any) -> bool:
    """Return whether a field type is `A | B`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def holds_dict(kind: Any) -> bool:
    """Return whether a field type is a dict, or a dict or something else."""
    return any((typing.get_origin(m) or m) is dict for m in _members(kind))


def config_class(kind: Any) -> type[BaseConfig] | None:
    """Return the config class of a field type `C` or `C | None`; None for every other type."""
    for member in _members(kind):
        if isinstance(member, type) and issubclass(member, BaseConfig):
            return member
    return None


def field_docs(cls: type[BaseConfig]) -> dict[str, str]:
    """Return field name -> the string literal under it, of a class and its base classes."""
    docs = {}
    for owner in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[line.target.id] = " ".join(str(below.value.value).split())
    return docs


def get_config_as_dict(cfg: Mapping[str, Any] | BaseConfig) -> dict[str, Any]:
    """Return the values of a config as nested plain dicts, independent copies."""
    if is_config(cfg):
        cfg = field_values(cfg)
    return {k: _plain(v) for k, v in cast(Mapping, cfg).items()}


def get_config_as_yaml_str(cfg: BaseConfig) -> str:
    """Return the values of a config as YAML, in the order of the schema."""
    return yaml.safe_dump(get_config_as_dict(cfg), sort_keys=False)


def parse_literal(text: str) -> Any:
    """Return what a command-line text spells: None, bool, number, list, dict, or the text."""
    word = text.strip()
    if word in ("None", "~") or word.lower() == "null":  # Python's, YAML's, Hydra's
        return None
    if word in ("true", "false"):
        return word == "true"
    try:
        value = ast.literal_eval(word)
        return value if isinstance(value, bool | int | float | str | list | dict | tuple) else word
    except (ValueError, SyntaxError, TypeError):
        pass
    if word[:1] in ("[", "{"):  # unquoted members, as OmegaConf takes them: [a.parquet,b.parquet]
        try:
            return yaml.safe_load(re.sub(r"(?<=[\w'\"]):(?=[^\s/])", ": ", word))
        except yaml.YAMLError:
            pass
    return str(text)


def convert_field(
    cls: type[BaseConfig], name: str, value: Any, path: str, current: Any = None
) -> Any:
    """Return `value` as a value of a field; objects in it become names where it takes them.

    None unsets a field: one of text whose default is "" becomes that.

    Args:
        path: the dotted name of the field.
        current: see `convert`.

    Raises:
        ValueError: it is none, or an object that no name leads to.
    """
    for marker in field_markers(cls)[name]:
        if isinstance(marker, TakesObjects):
            value = marker.named(value, path)
    literal = parse_literal(value) if isinstance(value, Text) else value
    if literal is None and cls.__dataclass_fields__[name].default == "":  # type: ignore[attr-defined]
        return ""
    return convert(value, field_types(cls)[name], path, current)


def convert(value: Any, kind: Any, path: str, current: Any = None) -> Any:
    """Return `value` as a value of the type `kind`.

    Args:
        value: what the user gave.
        kind: the annotation of the field.
        path: its dotted name, for messages.
        current: the config that a mapping for a config-typed field is merged into.

    Raises:
        ValueError: it is not one.
    """
    cls = config_class(kind)
    if cls is not None and not (value is None and type(None) in _members(kind)):
        literal = parse_literal(value) if isinstance(value, Text) else value
        if literal is None and type(None) in _members(kind):
            return None
        return literal if isinstance(literal, cls) else _merged(cls, literal, path, current)
    candidates = [value]
    if isinstance(value, Text):
        literal = parse_literal(value)
        # A string field takes the text itself, so run_name=123 is "123"; containers come first.
        # But run_name=null is no name: "'null'" is.
        candidates = [None] if literal is None else [literal, str(value)]
    for candidate in candidates:
        for member in _members(kind):
            fits, result = _as_member(candidate, member, path)
            if fits:
                return result
    lists = [member for member in _members(kind) if typing.get_origin(member) is list]
    fix = ""
    if lists and isinstance(value, str):
        is_list = value.lstrip().startswith("[")  # and could not be read as one
        fix = "; a bracket or a quote is missing" if is_list else f"; write \"['{value}']\""
    fix = "; leave it out" if candidates == [None] else fix
    raise ConfigError(path, _plain_text(value), f"expected {type_name(kind)}{fix}")


def type_name(kind: Any) -> str:
    """Return a type as messages and the documentation write it: `int`, `list[str] | None`."""
    if isinstance(kind, type) and not typing.get_args(kind):
        return "None" if kind is type(None) else kind.__name__
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(repr, typing.get_args(kind)))
    if is_union(kind):
        return " | ".join(type_name(m) for m in typing.get_args(kind))
    return str(kind).replace("typing.", "")


def check_field(cls: type[BaseConfig], name: str, prefix: str) -> None:
    """Raise ValueError unless the class has the field: with the nearest name, or the first."""
    names = list(field_types(cls))
    if name in names:
        return
    elsewhere = [k for k in _dotted_names(cls) if f".{name}." in f"{k}."]
    elsewhere = [f"{k}.".split(f".{name}.")[0] + f".{name}" for k in elsewhere]
    near = elsewhere[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    more = f" and {len(names) - SHOWN} more (docs/configuration.md)" if len(names) > SHOWN else ""
    fields = f"Fields of {cls.__name__}: {', '.join(names[:SHOWN])}{more}"
    raise UnknownField(_join(prefix, name), _join(prefix, near[0]) if near else "", fields)


def _dotted_names(cls: type[BaseConfig], prefix: str = "") -> list[str]:
    """Return the keys of `flatten` without making a config.

    A class may ask about itself in its __init__.
    """
    names = []
    for name, kind in field_types(cls).items():
        inner = kind if isinstance(kind, type) and issubclass(kind, BaseConfig) else None
        names += _dotted_names(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return names


def _merged(cls: type[Config], values: Any, path: str, current: Config | None) -> Config:
    """Return a config of `values` over `current` (default: the defaults of the class)."""
    if not hasattr(values, "items"):
        fields = f"{cls.__name__}: {', '.join(field_types(cls))}"
        remedy = f"expected a mapping of the fields of {fields}"
        fail(path or cls.__name__, _plain_text(values), remedy)
    current = cls() if current is None else current
    cls = type(current)
    changes = {str(k): v for k, v in values.items()}
    for name in changes:
        check_field(cls, name, path)
    old = {k: v for k, v in field_values(current).items() if k not in changes}
    new = {
        k: convert_field(cls, k, v, _join(path, k), getattr(current, k)) for k, v in changes.items()
    }
    return cls(**copy.deepcopy(old), **new)


def _as_member(value: Any, member: Any, path: str) -> tuple[bool, Any]:
    """Return whether a value is of one non-union type, and the value in that type."""
    origin, args = typing.get_origin(member) or member, typing.get_args(member)
    if origin in (Any, object):
        return True, _plain(value)
    if origin is float:
        return _as_float(value)
    if origin in (list, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return False, None
        kind = args[0] if args else Any
        return True, origin([convert(v, kind, f"{path}[{i}]") for i, v in enumerate(value)])
    if origin is dict:
        fits = hasattr(value, "items")
        return fits, _plain(value) if fits else None
    if origin is typing.Literal:
        fits = value in args
    else:
        fits = isinstance(value, origin) and (origin is bool or not isinstance(value, bool))
    return fits, value


def _as_float(value: Any) -> tuple[bool, float | None]:
    if isinstance(value, str):  # YAML reads 1e-6, without a dot, as a string
        try:
            return True, float(value)
        except ValueError:
            return False, None
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return fits, float(value) if fits else None


def _fields(cls: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if is_union(kind) else (kind,)


def _plain(value: Any) -> Any:
    """Return mappings as dicts and sequences as lists, all the way down."""
    if is_config(value) or hasattr(value, "items"):
        return get_config_as_dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(v) for v in value]
    return str(value) if type(value) is Text else value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((k, _hashable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_hashable(v) for v in value)
    try:
        hash(value)
    except TypeError:  # an array in a user's field: equal values have equal types at least
        return type(value).__qualname__
    return value


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _plain_text(value: Any) -> Any:
    return str(value) if isinstance(value, Text) else value
