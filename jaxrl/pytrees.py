"""Make classes pytrees of JAX without importing it: it takes a second, and a config needs none.

A class is registered at once where JAX is imported, and else as soon as somebody imports it: before
any array can be in one.
"""

import dataclasses
import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class PyTree:
    """Make a frozen dataclass of each subclass, a pytree whose leaves are its fields.

    As `flax.struct.PyTreeNode`, for what is also read where there is no JAX.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True)(cls)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        _register(lambda tree_util: tree_util.register_dataclass(cls, names, []))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def register_static(cls: type) -> None:
    """Make a class a pytree without leaves: part of a program, not of its data.

    Its objects are hashable; jit compiles once for each that differs.
    """
    _register(lambda tree_util: tree_util.register_static(cls))


Register = Callable[[Any], Any]  # is called with the module `jax.tree_util`
_waiting: list[Register] = []


def _register(register: Register) -> None:
    if jax := sys.modules.get("jax"):
        register(jax.tree_util)
        return
    if not _waiting:
        sys.meta_path.insert(0, _JaxFinder())
    _waiting.append(register)


class _JaxFinder(importlib.abc.MetaPathFinder):
    """Find JAX as the other finders do, and register what has waited for it once it has run."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of JAX with a loader that registers, of other modules none."""
        if name != "jax":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            for register in _waiting:
                register(module.tree_util)
            _waiting.clear()

        setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010  (pyright)
        return spec
