"""The flags with which the tests compile: that is most of their time, and what they run is small.

A step of a test takes 17 s of CPU with the emitters of fusions of jax 0.10, and 4 without. Later
versions of XLA have one set of emitters, and end a process for a flag that they do not know.
"""

from importlib.metadata import version

OLD_EMITTERS = int(version("jaxlib").split(".")[1]) < 11
# Parts of a program that are compiled side by side cost a fifth more; other tests have the cores.
IN_ONE = "--xla_cpu_parallel_codegen_split_count=1"
FLAGS = f"--xla_cpu_use_fusion_emitters=false {IN_ONE}" if OLD_EMITTERS else ""
