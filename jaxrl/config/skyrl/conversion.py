"""SkyRL's settings as ours: each is taken, changed, without effect, or refused with a reason."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from jaxrl.advantages import ESTIMATORS
from jaxrl.config.dataclass_config import Text, flatten, parse_literal
from jaxrl.config.field_status import SAME_DEFAULT, status_of
from jaxrl.config.generator import engine_tensor
from jaxrl.config.overrides import apply_overrides, current_name
from jaxrl.config.skyrl.names import OFF, SKYRLS_NAMES, EntryPoint, setting_of, unloadable
from jaxrl.config.train_config import TrainConfig, resolve
from jaxrl.config.validation import validate
from jaxrl.config_error import ConfigError, UnknownField
from jaxrl.losses import LOSSES

_ENGINE = "generator.inference_engine"
_ASYNC = "trainer.fully_async"
_OWN_FOLDERS = "trainer.ckpt_path", "trainer.export_path"
# Defaults of SkyRL that say how vLLM works, or what our engine makes of it, not what is computed.
_NOT_WRITTEN = {
    "trainer.log_path",  # logs of its infrastructure
    *_OWN_FOLDERS,
    "trainer.strategy",
    f"{_ENGINE}.backend",
    f"{_ENGINE}.tensor_parallel_size",
    f"{_ENGINE}.enable_prefix_caching",
    f"{_ENGINE}.enable_chunked_prefill",
    # Releases until spring 2026 had 0 and 5 by mistake; later ones have ours.
    "trainer.algorithm.cispo.cispo_eps_clip_low",
    "trainer.algorithm.cispo.cispo_eps_clip_high",
}
# Left at our default where it does not fit: how sampling is laid out, not what is sampled.
_LAYOUT = {
    "generator.batched",
    f"{_ENGINE}.num_engines",
    f"{_ENGINE}.tensor_parallel_size",
    f"{_ASYNC}.num_parallel_generation_workers",
}
_INTERVALS = ["ckpt_interval", "hf_save_interval", "eval_interval", "print_example_interval"]


@dataclass
class Conversion:
    """Hold a run of SkyRL as a config, and what became of each of its settings.

    Attributes:
        config: not resolved.
        num_devices: that SkyRL's run had, or those asked for; the config is valid on these.
        taken: settings that mean the same here.
        changed: "setting: what it is here" of the others that are in the config.
        inert: "setting: why it has no effect".
        refused: "setting: why it is left out"; the run would be another one.
        written_out: SkyRL's defaults that differ from ours and are in the config.
        named: our keys of the settings that are in the config.
        problem: what `validate` says of the whole, "" if nothing.
    """

    config: TrainConfig = field(default_factory=TrainConfig)
    num_devices: int = 1
    taken: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    inert: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    written_out: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    problem: str = ""

    @property
    def verdict(self) -> str:
        """Say whether the config is valid, and on how many devices."""
        devices = f"{self.num_devices} device{'s' * (self.num_devices != 1)}"
        return f"invalid on {devices}: {self.problem}" if self.problem else f"valid on {devices}"


def convert(
    settings: dict[str, Any], module: str, entry: EntryPoint, num_devices: int | None = None
) -> Conversion:
    """Convert SkyRL's settings of a run into a config.

    Args:
        settings: SkyRL's, by dotted key; a string is read as on the command line.
        module: name of the entry point, for the report.
        entry: what the entry point adds.
        num_devices: to be valid on; None = as many as SkyRL's run has.
    """
    result = Conversion()
    if entry.note:
        (result.refused if entry.refused else result.changed).append(f"{module}: {entry.note}")
    values = skyrl_defaults() | entry.sets
    for key, value in settings.items():
        _place(key.lstrip("+"), value, values, entry, result)
    run_name = values.get("trainer.run_name", TrainConfig().trainer.run_name)
    for key in _OWN_FOLDERS:
        if (row := status_of(key)) and key not in values:
            values[key] = f"{row.skyrl_default}{run_name}"  # SkyRL's is one for all runs
    if values.get("trainer.critic.model.path") is None:
        values.pop("trainer.critic.optimizer_config.offload_after_step")
    _fit_environment(values, result)
    if entry.own_code:
        _note_own_names(module, values, result)
    _fit_engine(values, result)
    _fit_async(values, result)
    _settle(values, num_devices, result)
    result.named &= values.keys()
    model = str(values.get("trainer.policy.model.path", ""))
    if (kind := unloadable(model)) and not result.problem:
        result.problem = (
            f"trainer.policy.model.path={model!r} is by its name {kind}, which jaxrl does not "
            "load; choose a dense language model (in its config.json model_type llama, qwen2, "
            "qwen3, mistral, gemma2 or gemma3_text)"
        )
    defaults = *skyrl_defaults(), *_OWN_FOLDERS
    result.written_out = [
        f"{key}={values[key]}" for key in defaults if key in values and key not in result.named
    ]
    return result


def skyrl_defaults() -> dict[str, Any]:
    """Return SkyRL's defaults where ours differ and the run would be another, by dotted key."""
    rows = {key: status_of(key) for key in flatten(TrainConfig())}
    return {
        key: row.skyrl_default
        for key, row in rows.items()
        if row is not None and row.skyrl_default is not SAME_DEFAULT
        if key not in _NOT_WRITTEN and not key.endswith("lora_sync_path")
    }


def _place(
    key: str, value: Any, values: dict[str, Any], entry: EntryPoint, result: Conversion
) -> None:
    """Put one setting into the values, or into the list of those without effect or refused."""
    literal = parse_literal(value) if isinstance(value, str) else value
    shown = f"{key}={value}"
    row, renamed = setting_of(key), ""
    if row is not None and row.kind == "renamed":
        key = renamed = row.note
    elif row is not None:
        off = literal in OFF or literal in row.neutral
        lines = result.inert if row.kind == "inert" or off else result.refused
        return lines.append(f"{shown}: {row.note}")
    if key.startswith("trainer.") and key.rpartition(".")[2] in _INTERVALS and literal == 0:
        value = -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of older names
        current = current_name(key, TrainConfig())
    status = status_of(current) or status_of(current.rpartition(".")[0])
    try:
        apply_overrides(TrainConfig(), {current: value})
    except UnknownField as error:
        near = f" Did you mean '{error.near}'?" if error.near else ""
        return result.refused.append(f"{shown}: unknown config field '{error.field}'.{near}")
    except ValueError as error:
        return result.refused.append(f"{shown}: {error}")
    if status is not None and (status.status == "inert" or current == "trainer.strategy"):
        return result.inert.append(f"{shown}: {status.note}")
    if current in entry.sets and "overlong" not in current:
        return result.changed.append(f"{shown}: {entry.sets[current]!r} here, {entry.note}")
    values[current] = Text(value) if isinstance(value, str) else value
    result.named.add(current)
    if renamed or current != key:
        result.changed.append(f"{shown}: {current} here")
    elif status is not None and status.status == "mapped":
        result.changed.append(f"{shown}: {status.note}")
    else:
        result.taken.append(shown)
    return None


def _fit_environment(values: dict[str, Any], result: Conversion) -> None:
    from jaxrl.envs import ENVS  # here: a config is made without environments

    name = str(values.get("environment.env_class", "gsm8k"))
    if name not in ENVS and ":" not in name:
        _drop("environment.env_class", values, result)
        known = ", ".join(sorted(ENVS))
        result.refused.append(
            f"environment.env_class={name}: known are {known}; yours is 'my_pkg.my_module:MyEnv', "
            f"or 'skyrl_gym:{name}' if skyrl-gym has it"
        )


def _note_own_names(module: str, values: dict[str, Any], result: Conversion) -> None:
    """Say what a name of the script stands for, where its own code may have registered another."""
    from jaxrl.envs import BUILT_IN  # here: a config is made without environments

    registered = {
        "environment.env_class": (BUILT_IN, "MyEnv"),
        "trainer.algorithm.policy_loss_type": (LOSSES, "my_loss"),
        "trainer.algorithm.advantage_estimator": (ESTIMATORS, "my_estimator"),
    }
    for key, (ours, example) in registered.items():
        name = str(values.get(key))
        if key in result.named and name in ours and name not in SKYRLS_NAMES[key]:
            result.changed.append(
                f"{key}={name!r}: jaxrl's own; if {module} registers another, write "
                f"'my_pkg.my_module:{example}'"
            )


def _fit_engine(values: dict[str, Any], result: Conversion) -> None:
    """Keep servers as servers; turn vLLM engines that the run starts into ours."""
    local = str(values.get(f"{_ENGINE}.run_engines_locally", True)).lower() != "false"
    backend = str(values.pop(f"{_ENGINE}.backend", "vllm"))
    if not local:
        values[f"{_ENGINE}.backend"] = Text("vllm")
        return
    if backend != "native":
        result.taken = [t for t in result.taken if not t.startswith(f"{_ENGINE}.backend=")]
        result.changed.append(
            f"{_ENGINE}.backend={backend}: 'native', the engine in this process; 'vllm' starts "
            "vLLM servers on devices of their own (docs/vllm.md)"
        )
    for key in [k for k in values if k.startswith(f"{_ENGINE}.engine_init_kwargs")]:
        shown = f"{key}={values[key]}"
        _drop(key, values, result)
        if "hf_overrides" in shown:
            reason = "the engine has the trainer's model; set trainer.policy.model_config_kwargs"
            result.refused.append(f"{shown}: {reason}")
        else:
            result.inert.append(f"{shown}: an argument of vLLM")
    for name in ("enforce_eager", "pipeline_parallel_size"):
        if (value := values.get(f"{_ENGINE}.{name}")) is not None:
            _drop(f"{_ENGINE}.{name}", values, result)
            result.inert.append(f"{_ENGINE}.{name}={value}: vLLM only")


def _fit_async(values: dict[str, Any], result: Conversion) -> None:
    trainer = apply_overrides(TrainConfig(), values).trainer
    if not trainer.fully_async.enabled:
        return
    if trainer.policy_mini_batch_size != trainer.train_batch_size:
        for key in [k for k in values if k.startswith(f"{_ASYNC}.")]:
            _drop(key, values, result)
        result.refused.append(
            f"{_ASYNC}.enabled=true: an asynchronous run makes one update of a batch, this one "
            f"{trainer.train_batch_size} / {trainer.policy_mini_batch_size}; written as a "
            "synchronous run"
        )
    elif trainer.fully_async.schedule == "free" and "generator.batched" in values:
        _drop("generator.batched", values, result)
        result.inert.append("generator.batched: prompts are sampled one by one")


def _settle(values: dict[str, Any], num_devices: int | None, result: Conversion) -> None:
    """Build and validate; a setting that `validate` refuses is mended or left out, with its reason.

    An asynchronous run gets the weights without which it is refused here: nothing would say that
    older ones sampled. A setting that has the default's value stays: without it the run would be
    the same.
    """
    while True:
        config = result.config = apply_overrides(TrainConfig(), values)
        result.num_devices = num_devices or _devices_of(config)
        hosts = config.trainer.placement.policy_num_nodes
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run prints them
                validate(resolve(config), result.num_devices, hosts)
            return
        except ConfigError as error:
            if error.changes and values.keys().isdisjoint(error.changes):
                values |= {k: Text(v) for k, v in error.changes.items()}
                added = ", ".join(f"{k}={v!r}" for k, v in error.changes.items())
                result.refused.append(f"{error} ({added} is added)")
                continue
            field = error.field.partition("[")[0]
            keys = [k for k in values if f"{k}.".startswith(f"{field}.")]
            default = TrainConfig()
            keys = [k for k in keys if apply_overrides(default, {k: values[k]}) != default]
            if not keys:
                result.problem = str(error)
                return
            asked = any(k in result.named for k in keys) and not _LAYOUT.issuperset(keys)
            for key in keys:
                _drop(key, values, result)
            (result.refused if asked else result.changed).append(str(error))
        except ValueError as error:  # of no field by itself
            result.problem = str(error)
            return


def _devices_of(config: TrainConfig) -> int:
    """Count the devices that SkyRL's run has."""
    placement, engine = config.trainer.placement, config.generator.inference_engine
    count = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    if placement.colocate_all:
        return count
    if not placement.colocate_policy_ref:
        count += placement.ref_num_nodes * placement.ref_num_gpus_per_node
    sizes = engine_tensor(engine) * engine.data_parallel_size
    return count + engine.num_engines * sizes * engine.run_engines_locally


def _drop(key: str, values: dict[str, Any], result: Conversion) -> None:
    values.pop(key, None)
    for lines in (result.taken, result.changed):
        lines[:] = [line for line in lines if not line.startswith(f"{key}=")]
