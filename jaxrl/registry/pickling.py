"""User functions: pickled by value for other processes, told apart by what they compute."""

import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
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
    inner = innermost(func)
    code = getattr(inner, "__code__", None)
    if code and code.co_filename == "<string>":  # of exec; Python 3.13 takes that of `-c` for it
        return "unknown"
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):  # typed at a prompt; a callable object
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()


def fingerprint(obj: Any, *, with_globals: bool = True) -> str:
    """Return the SHA-256 of what a function computes.

    That is its name, its source as Python compiled it, defaults, captured values and the globals
    that it reads, all by value. (The text of the source would not do: a process that received the
    function has none, the file may have been edited since, and lambdas share a line.) It is the
    same in every process, whether the function was imported or unpickled: its module, file and line
    numbers play no part. Installed functions and all modules count by name.

    Args:
        with_globals: False leaves the globals out, here and in what the function captures.
    """
    numbers: dict[int, int] = {}  # of what was met, by id: cycles end

    def content(value: Any) -> Any:
        """Return nested lists of text."""
        match value:
            case int() | float() | complex() | str() | bytes() | None | types.EllipsisType():
                found = repr(value)
            case list() | tuple():
                found = [content(x) for x in value]
            case set() | frozenset():
                found = sorted(repr(content(x)) for x in value)
            case dict():
                found = ["dict", content([*value.items()])]
            case types.ModuleType():
                found = ["module", value.__name__]
            case _ if hasattr(value, "__qualname__") and not _is_user_module(
                getattr(value, "__module__", None)  # methods of C types have none
            ):
                found = ["installed", getattr(value, "__module__", None), value.__qualname__]
            case _ if id(value) in numbers:
                found = ["met", numbers[id(value)]]
            case _:
                numbers[id(value)] = len(numbers)
                found = [type(value).__name__, content(_parts(value, with_globals))]
        return found

    return hashlib.sha256(repr(content(obj)).encode()).hexdigest()


def _parts(obj: Any, with_globals: bool) -> Any:
    """Return what makes a function, a class or an instance what it is."""
    match obj:
        case types.FunctionType():
            defaults = obj.__defaults__, obj.__kwdefaults__
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            read = _globals_read(obj) if with_globals else None
            declared = getattr(obj, "initial_state", None)  # see `registry.memory`
            parts = obj.__qualname__, obj.__code__, defaults, cells, read, declared
        case types.CodeType():
            names = obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_flags
            parts = obj.co_code, names, obj.co_consts
        case types.MethodType():
            parts = obj.__func__, obj.__self__
        case functools.partial():
            parts = obj.func, obj.args, obj.keywords
        case type():
            parts = obj.__qualname__, {k: v for k, v in vars(obj).items() if inspect.isfunction(v)}
        case _ if hasattr(obj, "__wrapped__"):  # jax.jit, jax.custom_jvp, jax.custom_vjp
            parts = obj.__wrapped__, [getattr(obj, name, None) for name in ("jvp", "fwd", "bwd")]
        case _ if hasattr(obj, "__array__"):
            if str(getattr(obj, "dtype", "")).startswith("key<"):  # of jax.random.key
                import jax  # not above: the registry's actor needs no jax

                obj = jax.random.key_data(obj)
            array = obj.__array__()
            parts = str(array.dtype), array.shape, array.tobytes()
        case _:
            parts = (type(obj), vars(obj)) if hasattr(obj, "__dict__") else pickle.dumps(obj)
    return parts


def _globals_read(func: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function and the functions in it read."""
    codes, names = [func.__code__], set()
    for code in codes:
        # not co_names: whoever reads config.trainer does not read a global `trainer`
        names |= {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {name: func.__globals__[name] for name in sorted(names) if name in func.__globals__}


def captured(func: Function) -> dict[str, Any]:
    """Return what a function reads beside its arguments, by name.

    Globals, captured variables, defaults, its own attributes; of another callable its attributes.
    """
    inner = innermost(func)
    if not inspect.isfunction(inner):
        return dict(getattr(inner, "__dict__", {}))
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    found = _globals_read(inner) | vars(inner)
    found |= {name: cell.cell_contents for name, cell in cells}
    return found | {"its defaults": (inner.__defaults__, inner.__kwdefaults__)}


def has_same_content(one: Function, other: Function, *, with_globals: bool = True) -> bool:
    """Return whether two functions have one name and compute the same, as far as can be told."""
    if one is other:
        return True
    try:
        contents = {fingerprint(func, with_globals=with_globals) for func in (one, other)}
    except Exception:  # of whatever they capture, a lock for instance
        return False
    return len(contents) == 1


def is_defined_again(one: Function, other: Function) -> bool:
    """Return whether one definition ran twice: a module both sent and imported, a script too.

    The globals play no part: they may have changed since, or not all be there yet.
    """
    one, other = (vars(f)["__wrapped__"] if is_jitted(f) else f for f in (one, other))
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    same_file = one.__code__.co_filename == other.__code__.co_filename
    same_place = same_file or one.__module__ == other.__module__
    return same_place and has_same_content(one, other, with_globals=False)


def is_edited_cell(one: Any, other: Any) -> bool:
    """Return whether both are versions of one notebook's or session's function or class.

    There editing and running a cell again is how one works; a script defines a name once.
    """
    main = sys.modules.get("__main__")
    inner = innermost(one), innermost(other)
    here = all(getattr(x, "__module__", None) == "__main__" for x in inner)
    return here and not hasattr(main, "__file__") and qualname(one) == qualname(other)


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
    inner, found = innermost(func), {}
    reached = [inner]
    if inspect.isfunction(inner):
        reached += inspect.getclosurevars(inner).nonlocals.values()
    for value in reached:
        name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is not None and module.__name__ not in found and _is_user_module(name):
            found[module.__name__] = module
            reached += vars(module).values()
    return [module for name, module in found.items() if name != "__main__"]  # always by value


class _Pickler(cloudpickle.Pickler):
    """Add to cloudpickle what it lacks.

    Modules of the user go as their contents, though they may import each other; a jitted function
    keeps its name and the function in it; a `jax.custom_vjp` can be loaded; code keeps its file,
    by which errors name the user's line.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # from cloudpickle 3.1.3 on its file is hidden
            make, arguments = self.dispatch_table[types.CodeType](obj)[:2]
            return _code_of_file, (obj.co_filename, make, arguments)
        if is_jitted(obj):
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


def _code_of_file(file: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return make(*arguments).replace(co_filename=file)


def _fill(obj: Any, contents: dict[str, Any]) -> None:
    vars(obj).update(contents)


def _fill_jitted(func: Any, state_and_names: tuple[Any, dict[str, Any]]) -> None:
    state, names = state_and_names
    func.__setstate__(state)
    vars(func).update(names)


class _Trial(pickle.Unpickler):
    """Load what this process pickled, to see whether that can be done.

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
        reached = inspect.getclosurevars(inner)
        parts = {**reached.globals, **reached.nonlocals}
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


def is_jitted(func: Any) -> bool:
    """Return whether a function comes from `jax.jit`, also where there is no jax: in an actor."""
    return type(func).__name__ == "PjitFunction"
