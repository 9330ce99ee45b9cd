"""Equal programs are one: what a process has traced and compiled, it need not trace again.

`jax.jit` knows a program by the function that it is given, and a function that is made anew for
every trainer is another one each time. Here functions stand at the top of their module, and what
they are bound to is compared by value: a second trainer of the same shape traces nothing.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax


class Bound(functools.partial):
    """Bind arguments to a function as `functools.partial` does; those that bind the same are equal.

    All that is bound must be hashable, and is a part of the program.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> Hashable:
        return self.func, self.args, frozenset(self.keywords.items())


def jit_once(function: Callable[..., Any], *, out_shardings: Any = None, **options: Any) -> Any:
    """Return `jax.jit` of a function, the same one for equal functions and options.

    Args:
        function: at the top of a module, or a `Bound` of such.
        out_shardings: a tree; None = as the compiler decides.
        options: other ones of `jax.jit`.
    """
    leaves, structure = jax.tree.flatten(out_shardings, is_leaf=lambda x: x is None)
    return _jitted(function, tuple(leaves), structure, tuple(sorted(options.items())))


def shapes_once(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Return what `jax.eval_shape` does, tracing equal functions once, see `jit_once`."""
    return jit_once(function).eval_shape(*args, **keywords)


@functools.lru_cache(maxsize=256)
def _jitted(function: Any, leaves: tuple, structure: Any, options: tuple) -> Any:
    out_shardings = jax.tree.unflatten(structure, leaves)
    return jax.jit(function, out_shardings=out_shardings, **dict(options))
