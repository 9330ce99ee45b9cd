"""User functions: found by path, pickled by value for other processes, told apart by content."""

import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle

from jaxrl.functions import INSTALLED, Function, innermost, origin, qualname

# Set by whoever imports a module; none of it can or need travel.
_OF_THE_IMPORT = ("__builtins__", "__cached__", "__file__", "__loader__", "__path__", "__spec__")


class PackedFunction(NamedTuple):
    """Hold a function on its way to another process."""

    data: bytes
    fingerprint: str
    origin: str  # "my_pkg.my_module:my_loss", for messages


def pack(func: Function, label: str, marks: Mapping[str, Any]) -> PackedFunction:
    """Pickle a function; modules that are not installed go along by value.

    Args:
        label: how an error calls the function.
        marks: what its registry notes about it; returned by `unpack`.

    Raises:
        ValueError: it cannot be pickled, or not be loaded again; the message names what it
            captures.
    """
    with _by_value(user_modules(func)):
        try:
            data = _dumps((func, dict(marks)))
            _Trial(io.BytesIO(data)).load()
            content = fingerprint((func, dict(marks)))
        except Exception as error:
            raise ValueError(
                f"{label} cannot be pickled ({error}); it captures {_unpicklable_parts(func)}. "
                "Create that inside the function"
            ) from error
    return PackedFunction(data, content, origin(func))


def unpack(packed: PackedFunction, label: str) -> tuple[Function, dict[str, Any]]:
    """Return a packed function and its marks.

    Raises:
        ValueError: a package that the function imports is missing here.
    """
    try:
        return pickle.loads(packed.data)
    except Exception as error:
        raise ValueError(
            f"{label} ({packed.origin}) of another process cannot be loaded here "
            f"({type(error).__name__}: {error}). Install what it imports on every host"
        ) from error


def source_hash(func: Function) -> str:
    """Return the SHA-256 of a function's own source, "unknown" where Python has no source."""
    try:
        source = inspect.getsource(innermost(func))
    except (OSError, TypeError):  # typed at a prompt; a callable object
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()


def fingerprint(obj: Any) -> str:
    """Return the SHA-256 of what a function computes.

    That is code, defaults, captured values, globals it reads. It is the same in every process,
    whether the function was imported or unpickled: names of its module, files and line numbers play
    no part. Installed functions and all modules count by name.
    """
    return hashlib.sha256(repr(_content(obj, {})).encode()).hexdigest()


def has_same_content(one: Function, other: Function) -> bool:
    """Return whether two functions have one name and compute the same, as far as can be told."""
    if one is other:
        return True
    try:
        return qualname(one) == qualname(other) and fingerprint(one) == fingerprint(other)
    except Exception:  # of whatever they capture, a lock for instance
        return False


def is_defined_again(one: Function, other: Function) -> bool:
    """Return whether one definition ran twice: a module both sent and imported, a script too.

    The globals play no part: they may have changed since, or not all be there yet.
    """
    one, other = (f.__wrapped__ if _is_jitted(f) else f for f in (one, other))
    if not (
        inspect.isfunction(one) and inspect.isfunction(other) and qualname(one) == qualname(other)
    ):
        return False
    same_file = one.__code__.co_filename == other.__code__.co_filename
    if not (same_file or one.__module__ == other.__module__):
        return False
    try:
        return fingerprint(_parts(one)[:-1]) == fingerprint(_parts(other)[:-1])
    except Exception:
        return False


def is_edited_cell(one: Any, other: Any) -> bool:
    """Return whether both are versions of one notebook's or session's function or class.

    There editing and running a cell again is how one works; a script defines a name once.
    """
    main = sys.modules.get("__main__")
    inner = innermost(one), innermost(other)
    here = all(getattr(x, "__module__", None) == "__main__" for x in inner)
    return here and not hasattr(main, "__file__") and qualname(one) == qualname(other)


# ------------------------------------------------------------------ content


@functools.singledispatch
def _content(obj: Any, seen: dict[int, int]) -> Any:
    """Return nested tuples of plain text; `seen` numbers what was met, so that cycles end."""
    if hasattr(obj, "__qualname__") and not _is_user_module(obj.__module__):
        return "installed", obj.__module__, obj.__qualname__
    if id(obj) in seen:
        return "seen", seen[id(obj)]
    seen[id(obj)] = len(seen)
    return type(obj).__name__, _content(_parts(obj), seen)


@_content.register(int | float | complex | str | bytes | type(None) | type(...))
def _(obj: Any, seen: dict[int, int]) -> Any:
    return repr(obj)


@_content.register
def _(obj: types.ModuleType, seen: dict[int, int]) -> Any:
    return "module", obj.__name__


@_content.register
def _(obj: list | tuple, seen: dict[int, int]) -> Any:
    return "sequence", [_content(x, seen) for x in obj]


@_content.register
def _(obj: set | frozenset, seen: dict[int, int]) -> Any:
    return "set", sorted(repr(_content(x, seen)) for x in obj)


@_content.register
def _(obj: dict, seen: dict[int, int]) -> Any:
    return "dict", [(repr(key), _content(value, seen)) for key, value in obj.items()]


@_content.register
def _(obj: types.CodeType, seen: dict[int, int]) -> Any:
    names = obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_flags
    return "code", obj.co_code.hex(), names, [_content(x, seen) for x in obj.co_consts]


@functools.singledispatch
def _parts(obj: Any) -> Any:
    """Return what makes a function, a class or an instance what it is."""
    if hasattr(obj, "__wrapped__"):  # jax.jit, jax.custom_jvp, jax.custom_vjp
        return obj.__wrapped__, [getattr(obj, name, None) for name in ("jvp", "fwd", "bwd")]
    if hasattr(obj, "__array__"):
        array = _as_numpy(obj)
        return str(array.dtype), array.shape, array.tobytes()
    return (type(obj), vars(obj)) if hasattr(obj, "__dict__") else pickle.dumps(obj)


@_parts.register
def _(obj: types.FunctionType) -> Any:
    cells = [cell.cell_contents for cell in obj.__closure__ or ()]
    # `is_defined_again` drops the last
    return obj.__code__, obj.__defaults__, obj.__kwdefaults__, cells, _globals_read(obj)


@_parts.register
def _(obj: types.MethodType) -> Any:
    return obj.__func__, obj.__self__


@_parts.register
def _(obj: functools.partial) -> Any:
    return obj.func, obj.args, obj.keywords


@_parts.register
def _(obj: type) -> Any:
    return obj.__qualname__, {k: v for k, v in vars(obj).items() if inspect.isfunction(v)}


def _as_numpy(obj: Any) -> Any:
    if str(getattr(obj, "dtype", "")).startswith("key<"):  # of jax.random.key
        import jax  # not above: the registry's actor needs no jax

        obj = jax.random.key_data(obj)
    return obj.__array__()


def _globals_read(func: types.FunctionType) -> dict[str, Any]:
    names = sorted(set(_global_names(func.__code__)))
    return {name: func.__globals__[name] for name in names if name in func.__globals__}


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


# ------------------------------------------------------------------ by value


def _is_user_module(name: str | None) -> bool:
    """Return whether other processes may lack a module: it is neither jaxrl's nor installed."""
    if name is None or name.partition(".")[0] in {"jaxrl", "builtins"}:
        return False
    module = sys.modules.get(name)
    if name == "__main__" or module is None:  # None: it came from another process
        return True
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    place = next((p for p in places if p), None)
    return place is not None and not place.startswith(INSTALLED)


def user_modules(func: Any) -> list[types.ModuleType]:
    """Return the modules that a function or class reaches and that are not installed.

    It reaches them through globals and captured values.
    """
    inner = innermost(func)
    found, queue = {}, [_module_name(inner)]
    captured = inspect.getclosurevars(inner).nonlocals if inspect.isfunction(inner) else {}
    queue += map(_module_name, captured.values())
    while queue:
        name = queue.pop()
        module = sys.modules.get(name or "")
        if module is None or module.__name__ in found or not _is_user_module(name):
            continue
        found[module.__name__] = module
        queue += map(_module_name, vars(module).values())
    return [module for name, module in found.items() if name != "__main__"]  # always by value


def _module_name(obj: Any) -> str | None:
    if isinstance(obj, types.ModuleType):
        return obj.__name__
    name = getattr(obj, "__module__", None)
    return name if isinstance(name, str) else None


class _Pickler(cloudpickle.Pickler):
    """Add to cloudpickle what it lacks.

    Modules of the user go as their contents, though they may import each other; a jitted function
    keeps its name and the function in it; a `jax.custom_vjp` can be loaded.
    """

    def reducer_override(self, obj: Any) -> Any:
        if _is_jitted(obj):
            make, arguments, state = obj.__reduce_ex__(self.proto)[:3]
            names = {name: getattr(obj, name) for name in functools.WRAPPER_ASSIGNMENTS[:3]}
            names["__wrapped__"] = obj.__wrapped__
            return make, arguments, (state, names), None, None, _fill_jitted
        if type(obj).__name__ == "custom_vjp":  # its __new__ asks for the function
            return object.__new__, (type(obj),), vars(obj), None, None, _fill
        if isinstance(obj, types.ModuleType) and _is_user_module(obj.__name__):
            contents = {k: v for k, v in vars(obj).items() if k not in _OF_THE_IMPORT}
            return types.ModuleType, (obj.__name__,), contents, None, None, _fill
        return super().reducer_override(obj)


def _fill(obj: Any, contents: dict[str, Any]) -> None:
    vars(obj).update(contents)


def _fill_jitted(func: Any, state: tuple[Any, dict[str, Any]]) -> None:
    func.__setstate__(state[0])
    vars(func).update(state[1])


class _Trial(pickle.Unpickler):
    """Loads what this process pickled, to see whether that can be done.

    cloudpickle would overwrite the methods of the classes that are here by their copies; without
    their tracker id it makes new classes.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found = super().find_class(module_name, global_name)
        if global_name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return lambda *arguments: found(*arguments[:-2], None, arguments[-1])
        return found


def _dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(obj)
    return buffer.getvalue()


@contextmanager
def _by_value(modules: list[types.ModuleType]) -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    modules = [module for module in modules if module.__name__ not in already]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _unpicklable_parts(func: Function) -> list[str]:
    """Return the names of captured variables, globals or attributes that cannot be pickled."""
    inner = innermost(func)
    if inspect.isfunction(inner):
        captured = inspect.getclosurevars(inner)
        parts = {**captured.globals, **captured.nonlocals}
    else:
        parts = getattr(inner, "__dict__", {})
    return sorted(name for name, value in parts.items() if not _can_be_pickled(value))


def _can_be_pickled(value: Any) -> bool:
    try:
        _Trial(io.BytesIO(_dumps(value))).load()
        fingerprint(value)
    except Exception:
        return False
    return True


def _is_jitted(func: Any) -> bool:
    return type(func).__name__ == "PjitFunction"  # of jax.jit; the registry's actor has no jax
