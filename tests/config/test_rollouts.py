"""Which engines a config may ask for."""

import contextlib

import pytest

from jaxrl import config as cfg
from jaxrl.config import (
    TrainConfig,
    apply_overrides,
    by_versions,
    in_process,
    resolve,
    sends_adapters,
    validate,
)
from jaxrl.config.placement import check_processes
from jaxrl.config.rollouts import least_hosts, server_urls
from jaxrl.config.validation import check_async

MODEL = {"trainer.policy.model.path": "m"}
DATA = {"data.train_data": ["d.parquet"]}
URLS = ["http://a:1", "http://b:1"]
JETSTREAM = {"backend": "jetstream", "run_engines_locally": False, "remote_urls": ["a:1"]}
SERVERS = {"run_engines_locally": False, "remote_urls": URLS}


def config_of(*, workers=0, **engine):
    fields = {f"generator.inference_engine.{name}": value for name, value in engine.items()}
    mask = fields.pop("generator.inference_engine.mask", None)
    sampling = {} if mask is None else {"generator.sampling_params.keep_sampling_mask": True}
    more = {} if mask is None else {"generator.sampling_params.top_k": mask}
    if workers:
        more["trainer.placement.rollout_num_nodes"] = workers
        more["trainer.placement.colocate_all"] = False
    return TrainConfig.from_cli_overrides({**MODEL, **DATA, **fields, **sampling, **more})


@pytest.mark.parametrize(
    ("engine", "urls"),
    [
        # three servers do not divide the trainer's eight devices, and need not
        ({"backend": "vllm", "num_engines": 3, "tensor_parallel_size": 2}, []),
        ({"backend": "vllm", "num_engines": 2, "engine_devices": ["0", "1"]}, []),
        ({"run_engines_locally": False, "remote_urls": URLS}, URLS),
        ({"run_engines_locally": False, "backend": "vllm", "external_server_urls": URLS}, URLS),
        ({"run_engines_locally": False, "external_proxy_url": URLS[0]}, URLS[:1]),
        (
            {"run_engines_locally": False, "remote_urls": URLS, "weight_transport": "transfer"},
            URLS,
        ),
        ({"workers": 2, "weight_transport": "transfer", "engine_devices": ["0", "1"]}, []),
        (SERVERS | {"weight_delta": True, "weights_folder": "gs://b/w"}, URLS),
    ],
)
def test_engines_in_other_processes(engine, urls):
    config = config_of(**engine)
    validate(config, 8)
    assert not in_process(config)
    assert server_urls(config) == urls


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (SERVERS, False),
        (SERVERS | {"weight_delta": True}, True),
        (SERVERS | {"weights_folder": "gs://b/w"}, True),
        (SERVERS | {"weights_folder": "file:///w"}, False),
        (SERVERS | {"weight_delta": True, "weight_transport": "transfer"}, False),
        ({"weights_folder": "gs://b/w"}, False),  # nobody reads it
        ({"workers": 2, "weight_delta": True}, False),
        (JETSTREAM | {"weights_folder": "/w"}, False),
    ],
)
def test_who_reads_versions_that_may_be_changes(engine, expected):
    assert by_versions(config_of(**engine)) is expected


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"run_engines_locally": False}, "run_engines_locally=False: needs remote_urls"),
        ({"remote_urls": URLS}, "remote_urls=.*needs run_engines_locally=false"),
        ({"external_proxy_url": URLS[0]}, "external_proxy_url='http://a:1': needs run_engines_loc"),
        (
            {"run_engines_locally": False, "remote_urls": URLS, "external_server_urls": URLS},
            "means the same as external_server_urls",
        ),
        (
            {"run_engines_locally": False, "remote_urls": ["a:1"]},
            "remote_urls='a:1': is no address; write it as http://host:port",
        ),
        (
            {"run_engines_locally": False, "remote_urls": URLS * 2},
            "names a server twice",
        ),
        (
            {"run_engines_locally": False, "remote_urls": URLS, "vllm_python": "python"},
            "vllm_python='python': is for engines that are started here",
        ),
        ({"engine_devices": ["0"]}, r"engine_devices=\['0'\]: .*backend='native'.* set None"),
        (
            {"backend": "vllm", "num_engines": 2, "engine_devices": ["0"]},
            r"engine_devices=\['0'\]: .*num_engines=2 set 2 of them",
        ),
        (
            {"weight_transport": "transfer"},
            "weight_transport='transfer': the engine is in this proc",
        ),
        (
            {"backend": "vllm", "weight_transport": "transfer"},
            "weight_transport='transfer': backend='vllm' cannot pull weights .*set 'folder'",
        ),
        (
            {
                "run_engines_locally": False,
                "external_proxy_url": URLS[0],
                "weight_transport": "transfer",
            },
            "weight_transport='transfer': a router cannot pull",
        ),
        ({"weight_delta": True}, "weight_delta=True: the engine is in this process, .* to false"),
        (
            {"backend": "vllm", "weight_delta": True},
            "weight_delta=True: backend='vllm' reads whole Hugging Face folders .*set it to false",
        ),
        (
            {"backend": "vllm", "weights_folder": "gs://b/w"},
            "weights_folder='gs://b/w': backend='vllm' reads whole .*set a folder that trainer and",
        ),
        (
            {**JETSTREAM, "weights_folder": "s3://b/w"},
            "weights_folder='s3://b/w': backend='jetstream' reads whole Hugging Face folders",
        ),
        ({"weight_transport": "files"}, "weight_transport='files': must be 'folder' or 'transfer'"),
        (
            {"weight_transfer_threshold_cuda_ipc_GB": 0.0},
            "weight_transfer_threshold_cuda_ipc_GB=0.0: must be positive",
        ),
        ({"workers": -1}, "rollout_num_nodes=-1: must not be negative"),
        ({"workers": 2, "backend": "vllm"}, "rollout_num_nodes=2: runs jaxrl's own .*'vllm'"),
        (
            {"workers": 2, "run_engines_locally": False, "remote_urls": URLS},
            "rollout_num_nodes=2: starts servers, and run_engines_locally=false names others",
        ),
        (
            {"workers": 2, "engine_devices": ["0"]},
            r"engine_devices=\['0'\]: .*trainer.placement.rollout_num_nodes=2 set 2 of them",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: is for backend='vllm'"),
        ({"hosts_per_engine": 2}, "hosts_per_engine=2: does not divide the 1 processes of the job"),
        ({"hosts_per_engine": 2, "backend": "vllm"}, "hosts_per_engine=2: is for jaxrl's own eng"),
        ({"backend": "vllm", "mask": 4}, "keep_sampling_mask=True: is not sent over HTTP"),
        ({"probe_bound": 0.0}, "probe_bound=0.0: must be positive"),
        ({"http_endpoint_port": 70000}, r"http_endpoint_port=70000: must be 0 \(any\) to 65535"),
    ],
)
def test_impossible_combinations_are_refused(engine, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(**engine), 8)


def test_greedy_answers_are_not_asked_of_servers_that_sample_at_one_temperature():
    config = config_of(**JETSTREAM, engine_init_kwargs={"control": "a:b"}, weights_folder="/w")
    changes = {
        "trainer.algorithm.advantage_estimator": "remax",
        "trainer.eval_interval": -1,
        "generator.sampling_params.logprobs": None,
    }
    with pytest.raises(ValueError, match="backend='jetstream': .*'remax' asks for greedy answers"):
        validate(apply_overrides(config, changes), 8)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tensor_parallel_size": 4}, None),  # of 2 x 2 devices
        ({"tensor_parallel_size": 8}, "tensor_parallel_size=8 is 8, .* divide 4 devices"),
        ({"num_engines": 2}, "hosts_per_engine=2: makes one engine of them, and num_engines=2"),
        ({"enable_http_endpoint": True}, "hosts_per_engine=2: samples only while the run does"),
    ],
)
def test_engines_over_two_of_four_processes(engine, message):
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        validate(config_of(hosts_per_engine=2, **engine), num_devices=8, num_processes=4)


@pytest.mark.parametrize(
    ("engine", "hosts"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 8}, 4),  # of two devices each
        ({"expert_parallel_size": 4}, 2),
        ({"tensor_parallel_size": 4, "enable_http_endpoint": True}, 1),  # not over several
        ({"tensor_parallel_size": 3}, 1),  # no number of them is parted by it
    ],
)
def test_the_fewest_processes_whose_devices_the_sizes_part(engine, hosts):
    assert least_hosts(config_of(**engine), num_devices=2, num_processes=4) == hosts


def test_sizes_left_to_memory_are_checked_on_as_many_processes_as_they_need():
    validate(config_of(tensor_parallel_size=8), num_devices=8, num_processes=4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is 3, .* divide 2 devices"):
        validate(config_of(tensor_parallel_size=3), num_devices=8, num_processes=4)
    with pytest.raises(ValueError, match=r"hosts_per_engine=0: must be positive, or None"):
        validate(config_of(hosts_per_engine=0), 8)


@pytest.mark.parametrize(
    ("hosts", "schedule", "size", "message"),
    [
        (1, "free", 4, None),
        (2, "lockstep", 4, None),
        (2, "free", 4, "schedule='free': an engine over the devices of 2 processes .* 'lockstep'"),
        (1, "lockstep", 2, "trainer.train_batch_size=2: leaves some of 4 engines without a prompt"),
        (2, "lockstep", 2, None),
    ],
)
def test_asynchronous_jobs_of_four_processes(hosts, schedule, size, message):
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    config = config_of(hosts_per_engine=hosts, tensor_parallel_size=2 * hosts)
    config.trainer.fully_async.enabled = True
    config.trainer.fully_async.schedule = schedule
    config.trainer.train_batch_size = size
    with refused:
        check_processes(config, num_devices=8, num_processes=4)


def test_an_engine_over_processes_samples_while_the_trainer_waits():
    """Split over the trainer's devices it would else be refused: two programs could wait for ever;
    so is one within a process."""
    config = resolve(config_of(hosts_per_engine=2, tensor_parallel_size=4))
    config.trainer.fully_async.enabled = True
    config.trainer.fully_async.schedule = "lockstep"
    config.trainer.policy_mini_batch_size = config.trainer.train_batch_size
    config.trainer.algorithm.policy_loss_type = "rollout_is"
    check_async(config, 2)
    config.generator.inference_engine.hosts_per_engine = 1
    with pytest.raises(ValueError, match="tensor_parallel_size=4: an engine that samples beside"):
        check_async(config, 2)


LORA = {
    "trainer.policy.model.lora.rank": 4,
    "trainer.policy.model.lora.lora_sync_path": "/shared/adapters",
}


@pytest.mark.parametrize(
    ("changes", "adapters"),
    [
        ({}, True),
        ({"trainer.policy.model.lora.rank": 0}, False),
        ({"trainer.policy.model.lora.lora_sync_path": None}, False),
    ],
)
def test_adapters_alone_go_to_vllm(changes, adapters):
    engine = {"generator.inference_engine.backend": "vllm"}
    config = TrainConfig.from_cli_overrides({**MODEL, **DATA, **engine, **LORA, **changes})
    validate(config, 8)
    assert sends_adapters(config) is adapters


def test_a_folder_for_adapters_that_nobody_reads_is_warned_of():
    config = TrainConfig.from_cli_overrides({**MODEL, **DATA, **LORA})
    said = "lora_sync_path='/shared/adapters' has no effect with .*backend='native'.*set it to None"
    with pytest.warns(UserWarning, match=said):
        validate(config, 8)
    assert not sends_adapters(config)


def test_workers_are_not_colocated():
    config = TrainConfig.from_cli_overrides(
        {**MODEL, **DATA, "trainer.placement.rollout_num_nodes": 2}
    )
    with pytest.raises(ValueError, match="rollout_num_nodes=2: are hosts that only sample; set"):
        validate(config, 8)


# ---- rows of the engine: what the run samples at once, no more -----------------------------------

STEP = {"trainer.train_batch_size": 4, "trainer.policy_mini_batch_size": 2}
ROOM = "generator.inference_engine.eval_prompts_at_once"


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (
            {"data.val_data": []},
            16,
        ),  # 4 prompts x 4 samples, and SkyRL's evaluation of 1024 is none
        ({"trainer.eval_interval": -1}, 16),
        ({}, 1024),  # until the prompts are counted
        ({"generator.eval_n_samples_per_prompt": 2}, 2048),
        ({ROOM: 80}, 80),
        ({ROOM: 80, "generator.eval_n_samples_per_prompt": 2}, 160),
        ({ROOM: 5}, 16),
        ({ROOM: 0}, 16),
    ],
)
def test_rows_that_a_run_samples_at_once(changes, rows):
    changes = {**STEP, "generator.n_samples_per_prompt": 4, "data.val_data": ["x.jsonl"], **changes}
    config = cfg.apply_overrides(cfg.TrainConfig(), changes)
    assert cfg.rows_at_once(config) == rows
    assert cfg.rows_at_once(config, 2) == -(-rows // 2)
    assert cfg.exact_rows(config) == min(rows, 1024)
