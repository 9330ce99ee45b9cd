"""Tables name -> function that all processes of a Ray job share."""

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

from jaxrl.advantages import ESTIMATORS
from jaxrl.functions import Function, import_function, origin, with_colon
from jaxrl.losses import BATCH_STATISTICS, LOSSES
from jaxrl.registry.contracts import check_estimator_signature, check_loss_signature
from jaxrl.registry.pickling import (
    PackedFunction,
    has_same_content,
    is_defined_again,
    is_edited_cell,
    pack,
    unpack,
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Hold what a table has under a name."""

    func: Function
    batch_statistics: bool = False  # the loss looks at the whole minibatch
    packed: PackedFunction | None = None  # as it travels, once it has
    session: str = ""  # of the RegistryActor that has it, or had
    received: bool = False  # another process registered it

    @property
    def marks(self) -> dict[str, Any]:
        """Return what travels with the function."""
        return {"batch_statistics": self.batch_statistics}


class BaseFunctionRegistry:
    """Hold one table of functions; subclasses name the kind and bring the built-ins.

    When Ray is initialised, what is registered in one process of the job is found in all. A lookup
    of a known name never leaves the process; registering, unregistering, listing and the lookup of
    an unknown name ask the job's `RegistryActor`.
    """

    _function_type: ClassVar[str] = "Function"
    _builtin: ClassVar[Mapping[str, Function]] = {}
    _batch_statistics: ClassVar[frozenset[str]] = frozenset()
    _entries: ClassVar[dict[str, Entry]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._entries = {}
        cls._add_builtins()

    @classmethod
    def register(cls, name: str | StrEnum, func: Function) -> None:
        """Add a function; when Ray is initialised, in every process of the job.

        The same function may be registered again, as by a notebook cell that runs twice; a cell
        that was edited replaces it.

        Raises:
            ValueError: the name is another function's, here or in another process; `func` is not
                callable, or not as its kind is called, or it must travel and cannot be pickled.
        """
        cls._register(plain_name(name), Entry(func))

    @classmethod
    def get(cls, name: str | StrEnum) -> Function:
        """Return the function registered under `name`.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        name = plain_name(name)
        if not cls._find(name):
            near = difflib.get_close_matches(name, cls._entries, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            kind, known = cls._function_type.lower(), list(cls._entries)
            if colon := with_colon(name):
                raise ValueError(f"Unknown {kind} '{name}'; {colon}")
            raise ValueError(f"Unknown {kind} '{name}'. Available: {known}.{hint}")
        return cls._entries[name].func

    @classmethod
    def resolve(cls, name: str | StrEnum) -> Function:
        """Return the function that a config names.

        The string is a registered name, or "my_pkg.my_module:my_function".
        """
        name = plain_name(name)
        if ":" not in name or cls._find(name):
            return cls.get(name)
        return import_function(name, cls._function_type)

    @classmethod
    def builtin_name(cls, name: str | StrEnum) -> str:
        """Return the name of the built-in that a name or path stands for; else `name` itself."""
        name = plain_name(name)
        if name in cls._builtin:
            return name
        try:
            func = cls.resolve(name)
        except ValueError:  # unknown: validation says so
            return name
        return next((known for known, f in cls._builtin.items() if f is func), name)

    @classmethod
    def list_available(cls) -> list[str]:
        """Return the names of all registered functions."""
        if _ray_is_initialized():
            cls.sync_with_actor()
        return list(cls._entries)

    @classmethod
    def unregister(cls, name: str | StrEnum) -> None:
        """Remove a function; other processes lose it when they next ask the actor.

        Raises:
            ValueError: the name is not registered.
        """
        name = plain_name(name)
        known = cls._entries.pop(name, None) is not None
        if _ray_is_initialized():
            known |= _ask_actor("remove", cls._function_type, name)
        if not known:
            raise ValueError(f"{cls._function_type} '{name}' not registered")

    @classmethod
    def reset(cls) -> None:
        """Empty the table, built-ins included, and the actor's."""
        cls._entries.clear()
        if _ray_is_initialized():
            _ask_actor("clear", cls._function_type)

    @classmethod
    def repopulate_registry(cls) -> None:
        """Add the built-ins that are missing; what is registered stays."""
        cls._add_builtins()

    @classmethod
    def repopulate(cls) -> None:
        """Reset the table to the built-ins alone."""
        cls.reset()
        cls._add_builtins()

    @classmethod
    def user_functions(cls) -> dict[str, Function]:
        """Return what was registered beyond, or over, the built-ins."""
        return {n: e.func for n, e in cls._entries.items() if cls._builtin.get(n) is not e.func}

    @classmethod
    def sync_with_actor(cls) -> None:
        """Share what was registered here, get what was registered elsewhere in the Ray job.

        Functions that another process unregistered since disappear here too.

        Raises:
            ValueError: Ray is not initialised; a name stands for two different functions; a
                function cannot be pickled or loaded.
        """
        if not _ray_is_initialized():
            raise ValueError(
                "Ray is not initialized, cannot sync with actor. Call "
                "jaxrl.cluster.initialize_ray(config) or ray.init() first"
            )
        session = _ask_actor("session")  # another after ray.shutdown(): it knows nothing of ours
        shared = {n for n, entry in cls._entries.items() if entry.session == session}
        new = cls._pack(cls.user_functions().keys() - shared)
        clashes, table = _ask_actor("exchange", cls._function_type, new)
        for name, other in clashes.items():
            raise ValueError(
                f"{cls._function_type} '{name}' already registered by another process, with "
                f"another function: {other} there, {new[name].origin} here. Choose another name, "
                "or unregister one of them first"
            )
        for name in shared - table.keys():
            del cls._entries[name]
        for name, packed in new.items():
            entry = cls._entries[name]
            cls._entries[name] = dataclasses.replace(entry, packed=packed, session=session)
        known = {n: e.packed.fingerprint for n, e in cls._entries.items() if e.packed}
        lacking = {n: p for n, p in table.items() if known.get(n) != p.fingerprint}
        cls._receive(lacking, session)

    @classmethod
    def _register(cls, name: str, entry: Entry) -> None:
        if not callable(entry.func):
            raise ValueError(
                f"{cls._function_type} '{name}' must be a function, got {entry.func!r}"
            )
        cls._check_signature(f"{cls._function_type} '{name}'", entry.func)
        known = cls._entries.get(name)
        if known is not None and is_edited_cell(known.func, entry.func):
            cls.unregister(name)
            known = None
        if known is not None:
            entry = cls._again(name, known, entry)
        cls._entries[name] = entry
        if known is None and _ray_is_initialized():
            try:
                cls.sync_with_actor()
            except BaseException:
                del cls._entries[name]
                raise

    @classmethod
    def _check_signature(cls, label: str, func: Function) -> None:
        """Refuse a function that cannot be called as its kind is; a ValueError that names why."""

    @classmethod
    def _again(cls, name: str, known: Entry, entry: Entry) -> Entry:
        """Return the entry of a name registered again; refuse other code or marks.

        A cell may run again; a module may be imported after the process received its function.
        Where the globals of the two differ, the received one stays: all processes compute the same.
        """
        same = has_same_content(known.func, entry.func)
        if known.marks != entry.marks or not (same or is_defined_again(known.func, entry.func)):
            raise ValueError(
                f"{cls._function_type} '{name}' already registered: {origin(known.func)}, with "
                f"other code or marks than {origin(entry.func)}. Choose another name, or call "
                f"{cls.__name__}.unregister('{name}') first"
            )
        if known.received and not same:
            return known
        return dataclasses.replace(known, func=entry.func, received=False)

    @classmethod
    def _find(cls, name: str) -> bool:
        """Return whether a name is known, here or to the actor; it is known here afterwards."""
        if name not in cls._entries and _ray_is_initialized():
            cls.sync_with_actor()
        return name in cls._entries

    @classmethod
    def _add_builtins(cls) -> None:
        for name, func in cls._builtin.items():
            cls._entries.setdefault(name, Entry(func, name in cls._batch_statistics))

    @classmethod
    def _pack(cls, names: Iterable[str]) -> dict[str, PackedFunction]:
        packed = {}
        for name in names:
            entry, label = cls._entries[name], f"{cls._function_type} '{name}'"
            if name in cls._builtin:
                raise ValueError(
                    f"{label} is built in and cannot be another function in other processes; "
                    "register yours under another name"
                )
            packed[name] = entry.packed or pack(entry.func, label, entry.marks)
        return packed

    @classmethod
    def _receive(cls, functions: Mapping[str, PackedFunction], session: str = "") -> None:
        errors = []
        for name, packed in functions.items():
            try:
                func, marks = unpack(packed, f"{cls._function_type} '{name}'")
            except ValueError as error:  # later: the other functions are fine
                errors.append(error)
                continue
            cls._entries[name] = Entry(func, **marks, packed=packed, session=session, received=True)
        if errors:
            raise errors[0]


class PolicyLossRegistry(BaseFunctionRegistry):
    """Hold the policy losses, see `jaxrl.losses` for the contract."""

    _function_type = "policy loss"
    _builtin = LOSSES
    _batch_statistics = BATCH_STATISTICS

    @classmethod
    def register(cls, name: str | StrEnum, func: Function, batch_statistics: bool = False) -> None:
        """Add a policy loss, see `BaseFunctionRegistry.register`.

        Args:
            batch_statistics: the loss of a token depends on other rows of the minibatch (a
                quantile, a top-k, a mean over rows): it must be evaluated on the whole minibatch.
        """
        cls._register(plain_name(name), Entry(func, batch_statistics))

    @classmethod
    def _check_signature(cls, label: str, func: Function) -> None:
        check_loss_signature(label, func)

    @classmethod
    def has_batch_statistics(cls, name: str | StrEnum) -> bool:
        """Return whether a loss, by name or path, was registered with `batch_statistics=True`."""
        func = cls.resolve(name)
        return any(e.batch_statistics and e.func is func for e in cls._entries.values())


class AdvantageEstimatorRegistry(BaseFunctionRegistry):
    """Hold the advantage estimators, see `jaxrl.advantages` for the contract."""

    _function_type = "advantage estimator"
    _builtin = ESTIMATORS

    @classmethod
    def _check_signature(cls, label: str, func: Function) -> None:
        check_estimator_signature(label, func)


def plain_name(name: str | StrEnum) -> str:
    """Return the string of an enum's member, which itself could not be pickled by value."""
    return name.value if isinstance(name, StrEnum) else name


def _ray_is_initialized() -> bool:
    ray = sys.modules.get("ray")  # not imported: then nobody has initialised it
    return ray is not None and ray.is_initialized()


def _ask_actor(method: str, *args: Any) -> Any:
    """Call a method of the job's `RegistryActor`: the one import upward, where there is Ray."""
    from jaxrl.cluster import registry_sync

    return registry_sync.ask(method, *args)
