"""The public SDK, unchanged, against the service: every call it has, and what comes back."""

import time

import numpy as np
import pytest
import tinker
from tinker import types

from jaxrl.tools.tinker.journal import Call
from jaxrl.tools.tinker.keys import Keys
from tests.tools.tinker.serving import (
    BASE,
    KEY,
    OTHER_KEY,
    client,
    datum,
    log_probs,
    serving,
    trainer,
)

PROMPT = types.ModelInput.from_ints([3, 1, 4, 2, 13])
NAN = float("nan")
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tinker")) as running:
        yield running


@pytest.fixture
def service(server):
    with client(server) as one:
        yield one


def rest(server, key=KEY):
    return tinker.RestClient(base_url=server.url, api_key=key)


def some(number=3, seed=0):
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        length = int(rng.integers(2, 20))
        tokens = rng.integers(0, 40, length + 1).tolist()
        found.append(datum(tokens, weights=rng.random(length).astype(np.float32)))
    return found


def step(model, data, loss="cross_entropy", adam=ADAM):
    forward, update = model.forward_backward(data, loss), model.optim_step(adam)
    found = forward.result()
    update.result()
    return found


def sampled(sampler, number=2, **params):
    params = types.SamplingParams(**({"max_tokens": 6} | params))
    found = sampler.sample(prompt=PROMPT, num_samples=number, sampling_params=params).result()
    return [(s.tokens, s.logprobs, s.stop_reason) for s in found.sequences]


# ---------------------------------------------------------------- training


def test_what_is_there(server, service):
    (model,) = rest(server).get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == (BASE, 128)
    info = trainer(service, rank=3).get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 3, BASE)
    tokenizer = trainer(service).get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("3142")) == "3142"


def test_losses_of_a_call_are_sums_of_its_tokens(service):
    model = trainer(service)
    given = some(5)
    alone = model.forward(given, "cross_entropy").result()
    x, weights = log_probs(alone), [d.loss_fn_inputs["weights"].to_numpy() for d in given]
    total = -sum(float(a @ w) for a, w in zip(x, weights, strict=True))
    assert alone.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    q = [a - 0.3 for a in x]
    off = [
        datum(
            [*d.model_input.to_ints(), d.loss_fn_inputs["target_tokens"].data[-1]],
            logprobs=s,
            advantages=w - 0.5,
        )
        for d, s, w in zip(given, q, weights, strict=True)
    ]
    ratio = np.exp(np.float32(0.3))  # 1.35, above the default of 1.2
    a = np.concatenate([w - 0.5 for w in weights])
    lp = np.concatenate(x)
    expected = {
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -np.minimum(ratio * a, 1.2 * a).sum(),
        "cispo": -(1.2 * a * lp).sum(),
        "dro": (0.5 * 0.05 * 0.3**2 - a * lp).sum(),
    }
    for name, value in expected.items():
        found = model.forward(off, name).result()
        assert found.metrics["loss:sum"] == pytest.approx(float(value), rel=1e-4), name
    wide = model.forward(off, "ppo", {"clip_high_threshold": 2.0}).result()
    assert wide.metrics["loss:sum"] == pytest.approx(float(-(ratio * a).sum()), rel=1e-4)


def test_a_model_learns_and_gradients_add_up_until_the_step(service):
    one, parts = trainer(service), trainer(service)
    given = some(6)
    before = one.forward(given, "cross_entropy").result().metrics["loss:sum"]
    for _ in range(3):
        found = step(one, given)
        halves = [parts.forward_backward(half, "cross_entropy") for half in (given[:3], given[3:])]
        parts.optim_step(ADAM).result()
        total = sum(half.result().metrics["loss:sum"] for half in halves)
        assert total == pytest.approx(found.metrics["loss:sum"], rel=1e-4)
    assert found.metrics["loss:sum"] < before - 1


def test_a_long_call_travels_in_parts_and_is_done_in_order(server, service, monkeypatch):
    model, same = trainer(service), trainer(service)
    given = some(8)
    whole = step(model, given)
    short = service.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    monkeypatch.setattr(service.holder, "_client_config", short)
    parts = step(same, given)
    assert len(parts.loss_fn_outputs) == 8
    for x, y in zip(log_probs(whole), log_probs(parts), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    after = [m.forward(given, "cross_entropy").result().metrics["loss:sum"] for m in (model, same)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)


def test_the_same_seed_draws_the_same_adapters_and_kinds_are_left_out(service):
    def after(**settings):
        model = trainer(service, **settings)
        step(model, some())
        return model.forward(some(), "cross_entropy").result().metrics["loss:sum"]

    first = after(seed=7)
    assert after(seed=7) == first
    assert after(seed=8) != first
    assert after(seed=7, train_mlp=False) != first
    untrained = trainer(service).forward(some(), "cross_entropy").result().metrics["loss:sum"]
    head = {"train_attn": False, "train_mlp": False}
    assert after(seed=7, **head) not in (first, pytest.approx(untrained, abs=1e-3))


def test_several_targets_at_a_place(service):
    import torch

    model, same = trainer(service), trainer(service)
    rng = np.random.default_rng(0)

    def several(tokens, width):
        ids = np.stack([rng.permutation(40)[:width] for _ in tokens[1:]])
        weights = rng.random(ids.shape).astype(np.float32)
        weights[0, 0] = 0
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": ids, "weights": weights},
        )

    wide = [several([1, 2, 3, 4], 3), several([5, 6, 7], 5)]
    found = step(model, wide)
    assert [x.shape for x in log_probs(found)] == [(3, 3), (2, 5)]
    # the same, one target after the other
    narrow = [
        types.Datum(
            model_input=d.model_input,
            loss_fn_inputs={name: x.to_numpy()[:, k] for name, x in d.loss_fn_inputs.items()},
        )
        for d in wide
        for k in range(d.loss_fn_inputs["weights"].to_numpy().shape[1])
    ]
    one_by_one = step(same, narrow)
    assert one_by_one.metrics["loss:sum"] == pytest.approx(found.metrics["loss:sum"], rel=1e-5)
    flat = np.concatenate([x.T.ravel() for x in log_probs(found)])
    np.testing.assert_allclose(np.concatenate(log_probs(one_by_one)), flat, atol=1e-5)
    after = [m.forward(some(), "cross_entropy").result().metrics["loss:sum"] for m in (model, same)]
    assert after[0] == pytest.approx(after[1], rel=1e-5)

    sparse = torch.zeros(3, 100)
    sparse[:, 7] = torch.tensor([0.5, 0.25, 1.0])
    ids = torch.zeros(3, 100, dtype=torch.int64)
    ids[:, 7] = 11
    listed = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": ids, "weights": sparse},
    )
    assert listed.loss_fn_inputs["weights"].sparse_col_indices == [7, 7, 7]
    plain = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [11, 11, 11], "weights": [0.5, 0.25, 1.0]},
    )
    totals = [model.forward([d], "cross_entropy").result().metrics for d in (listed, plain)]
    assert totals[0]["loss:sum"] == pytest.approx(totals[1]["loss:sum"], rel=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="only cross_entropy takes 2"):
        model.forward(wide, "ppo").result()


def test_a_loss_of_the_client_runs_there(service):
    model, same = trainer(service), trainer(service)
    given = some(4)

    def loss(data, found):
        total = sum(
            -(d.loss_fn_inputs["weights"].to_torch() * x).sum()
            for d, x in zip(data, found, strict=True)
        )
        return total, {"mine": float(total)}

    custom = model.forward_backward_custom(given, loss)
    model.optim_step(ADAM).result()
    expected = step(same, given).metrics["loss:sum"]
    assert custom.result().metrics["mine"] == pytest.approx(expected, rel=1e-5)
    after = [m.forward(given, "cross_entropy").result().metrics["loss:sum"] for m in (model, same)]
    assert after[0] == pytest.approx(after[1], rel=1e-6)


def test_a_loss_that_travels_runs_on_the_server(service):
    import torch

    def squared(logprobs, weights, scale):
        apart = torch.clamp(logprobs + 3.0, min=-2.0) * weights
        return scale * apart.square().sum(), {"custom/apart:mean": apart.abs().mean().detach()}

    ranks = {"logprobs": 1, "weights": 1, "scale": 0}
    handle = service.create_custom_loss(squared, ranks).result()
    model, same = trainer(service), trainer(service)
    given = [
        types.Datum(
            model_input=d.model_input,
            loss_fn_inputs=d.loss_fn_inputs | {"scale": np.array(0.5, np.float32)},
        )
        for d in some(4)
    ]
    found = model.forward_backward_custom(given, handle).result()

    def locally(data, found):
        parts = [
            squared(x, d.loss_fn_inputs["weights"].to_torch(), 0.5)
            for d, x in zip(data, found, strict=True)
        ]
        told = float(sum(m["custom/apart:mean"] for _, m in parts)) / len(parts)
        total = sum(total for total, _ in parts)
        return total, {"apart": told, "loss": float(total)}

    expected = same.forward_backward_custom(some(4), locally).result()
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    assert found.metrics["custom/apart:mean"] == pytest.approx(expected.metrics["apart"], rel=1e-5)
    for one in (model, same):
        one.optim_step(ADAM).result()
    after = [m.forward(some(4), "cross_entropy").result() for m in (model, same)]
    for x, y in zip(*map(log_probs, after), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_an_operation_that_is_not_allowed_is_refused_by_name(service):
    import torch

    def loss(logprobs):
        return torch.linalg.norm(logprobs), {}

    with pytest.raises(tinker.BadRequestError, match="torch._C._linalg.*norm|torch.linalg.norm"):
        service.create_custom_loss(loss, {"logprobs": 1}).result()


# ---------------------------------------------------------------- samples


def test_samples_are_drawn_with_the_log_probs_that_the_model_gives(service):
    model = trainer(service)
    step(model, some())
    sampler = model.save_weights_and_get_sampling_client().result()
    for tokens, found, reason in sampled(sampler, temperature=1.0, seed=5, stop=[]):
        assert (len(tokens), reason) == (6, "length")
        whole = [*PROMPT.to_ints(), *tokens]
        scored = model.forward([datum(whole, weights=[1.0] * (len(whole) - 1))], "cross_entropy")
        np.testing.assert_allclose(log_probs(scored.result())[0][-6:], found, atol=1e-4)
        told = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
        assert told[0] is None
        np.testing.assert_allclose(told[-6:], found, atol=1e-4)


def test_samples_are_a_function_of_seed_weights_and_prompt(service):
    model = trainer(service)
    base = service.create_sampling_client(base_model=BASE).result()
    new = model.save_weights_and_get_sampling_client().result()
    assert sampled(new, seed=1) == sampled(base, seed=1)  # B is 0
    step(model, some())
    learnt = model.save_weights_and_get_sampling_client().result()
    assert sampled(new, seed=1) == sampled(base, seed=1)
    assert sampled(learnt, seed=1) != sampled(base, seed=1)
    assert sampled(learnt, seed=1) == sampled(learnt, seed=1)
    assert sampled(learnt) != sampled(learnt)
    assert sampled(learnt, temperature=0.0, number=1) * 2 == sampled(learnt, temperature=0.0)


def test_what_ends_a_sample(service):
    sampler = service.create_sampling_client(base_model=BASE).result()
    ((free, _, _),) = sampled(sampler, number=1, seed=2, stop=[], max_tokens=20)
    ((tokens, _, reason),) = sampled(sampler, number=1, seed=2, stop=[free[3]], max_tokens=20)
    assert (tokens, reason) == (free[: free.index(free[3]) + 1], "stop")
    found = sampler.sample(
        prompt=PROMPT,
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=3, seed=2, top_k=1),
        topk_sample_logprobs=3,
    ).result()
    (one,) = found.sequences
    for token, log_prob, best in zip(one.tokens, one.logprobs, one.topk_logprobs, strict=True):
        assert len(best) == 3
        assert best[0][0] == token
        assert log_prob == pytest.approx(0, abs=1e-6)  # of the one token that top_k leaves


def test_the_likeliest_in_places_of_a_prompt(service):
    import torch

    model = trainer(service)
    step(model, some(8))
    sampler = model.save_weights_and_get_sampling_client().result()
    tokens, k = PROMPT.to_ints(), 4
    settings = {"num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1)}
    found = sampler.sample(prompt=PROMPT, topk_prompt_logprobs=k, **settings).result()
    assert found.prompt_logprobs is None
    assert found.topk_prompt_logprobs[0] is None
    best = found.topk_prompt_logprobs[1:]
    assert [len(place) for place in best] == [k] * 4
    every = np.arange(48)  # ids of the model
    targets = torch.tensor(np.tile(every, (4, 1)))
    asked = datum(tokens, target_tokens=targets, weights=torch.zeros(4, 48))
    scores = log_probs(model.forward([asked], "cross_entropy").result())[0].reshape(4, 48)
    for place, of_all in zip(best, scores, strict=True):
        assert [token for token, _ in place] == np.argsort(-of_all)[:k].tolist()
        np.testing.assert_allclose([x for _, x in place], np.sort(of_all)[::-1][:k], atol=1e-5)
    last = sampler.sample(
        prompt=PROMPT,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
        prompt_logprobs_last_n=2,
        **settings,
    ).result()
    assert last.topk_prompt_logprobs == [None] * 3 + best[2:]
    assert last.prompt_logprobs[:3] == [None] * 3
    expected = [scores[2, tokens[3]], scores[3, tokens[4]]]
    np.testing.assert_allclose(last.prompt_logprobs[3:], expected, atol=1e-5)


def test_more_samplers_than_places_take_turns(service):
    found = []
    for seed in range(5):
        model = trainer(service, seed=seed)
        step(model, some(seed=seed))
        found.append(model.save_weights_and_get_sampling_client().result())
    params = types.SamplingParams(max_tokens=6, seed=1)
    asked = [s.sample(prompt=PROMPT, num_samples=2, sampling_params=params) for s in found * 3]
    drawn = [[s.tokens for s in future.result().sequences] for future in asked]
    assert drawn[:5] == drawn[5:10] == drawn[10:]
    assert len({str(tokens) for tokens in drawn}) == 5


# ---------------------------------------------------------------- checkpoints


def test_a_model_goes_on_from_what_was_saved(service):
    model = trainer(service)
    step(model, some(seed=1))
    path = model.save_state("first", user_metadata={"step": "1"}).result().path
    expected = [step(model, some(seed=n)).metrics["loss:sum"] for n in (2, 3)]
    same = service.create_training_client_from_state_with_optimizer(path).result()
    assert [step(same, some(seed=n)).metrics["loss:sum"] for n in (2, 3)] == expected
    bare = service.create_training_client_from_state(path).result()
    found = [step(bare, some(seed=n)).metrics["loss:sum"] for n in (2, 3)]
    assert found[0] == expected[0]
    assert found[1] != expected[1]  # other moments


def test_checkpoints_are_listed_named_kept_for_a_time_and_deleted(server, service):
    model, api = trainer(service), rest(server)
    path = model.save_state("one", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    sampler = model.save_weights_for_sampler("two").result().path
    found = {c.tinker_path: c for c in api.list_checkpoints(model.model_id).result().checkpoints}
    assert set(found) == {path, sampler}
    assert found[path].user_metadata == {"a": "b"}
    assert (found[path].expires_at - found[path].time).total_seconds() == 3600
    assert found[sampler].expires_at is None
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        model.save_state("one").result()
    model.save_state("one", overwrite=True).result()
    run = api.get_training_run(model.model_id).result()
    assert (run.last_checkpoint.tinker_path, run.lora_rank) == (path, 4)
    runs = api.list_training_runs().result().training_runs
    assert model.model_id in {run.training_run_id for run in runs}
    assert api.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert {c.tinker_path for c in api.list_user_checkpoints().result().checkpoints} >= set(found)
    api.set_checkpoint_ttl_from_tinker_path(path, 1).result()
    time.sleep(1.1)
    api.delete_checkpoint_from_tinker_path(sampler).result()
    assert api.list_checkpoints(model.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="there is no such checkpoint"):
        service.create_sampling_client(model_path=sampler).result()


def test_more_models_than_slots_keep_what_they_are(service):
    models = [trainer(service, seed=seed) for seed in range(7)]
    alone = [trainer(service, seed=seed) for seed in (3,)][0]
    expected = [step(alone, some(seed=n)).metrics["loss:sum"] for n in range(3)]
    found = []
    for n in range(3):
        pending = []
        for model in models:
            pending.append(model.forward_backward(some(seed=n), "cross_entropy"))
            model.optim_step(ADAM)
        found.append([forward.result() for forward in pending][3].metrics["loss:sum"])
    assert found == expected


# ---------------------------------------------------------------- owners, sessions, errors


def test_nothing_of_a_key_is_seen_with_another(server, service):
    model = trainer(service)
    path = model.save_state("mine").result().path
    sampler = model.save_weights_for_sampler("mine").result().path
    with client(server, OTHER_KEY) as other:
        with pytest.raises(tinker.NotFoundError):
            other.create_training_client_from_state(path).result()
        with pytest.raises(tinker.NotFoundError):
            other.create_sampling_client(model_path=sampler).result()
        api = rest(server, OTHER_KEY)
        assert path not in {c.tinker_path for c in api.list_user_checkpoints().result().checkpoints}
        for call in (
            lambda: api.get_training_run(model.model_id),
            lambda: api.delete_checkpoint_from_tinker_path(path),
            lambda: api.get_session(service.holder.get_session_id()),
        ):
            with pytest.raises(tinker.NotFoundError):
                call().result()
    assert step(model, some()).metrics["loss:sum"] > 0


def test_a_finished_session_is_over_and_its_checkpoints_are_not(server):
    with client(server) as service:
        model = trainer(service)
        path = model.save_state("last").result().path
        session = service.holder.get_session_id()
        found = rest(server).get_session(session).result()
        assert found.training_run_ids == [model.model_id]
    sql = "SELECT COUNT(*) FROM calls WHERE target = ? AND body IS NOT NULL"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        bodies = server.service.journal.rows(sql, model.model_id)
        if model.model_id not in server.service._models and bodies == [(0,)]:
            break
        time.sleep(0.1)
    assert model.model_id not in server.service._models
    assert bodies == [(0,)]  # what it was asked is not done again
    with client(server) as service:
        service.create_training_client_from_state(path).result()


def test_what_waits_when_its_session_ends_is_answered(server):
    with client(server) as service:
        model = trainer(service)
        name, owner = model.model_id, Keys([]).owner({"X-API-Key": KEY}, "127.0.0.1")
        call = Call(f"{name}:9", owner, name, 9, "optim_step", b"{}")
        server.service.accept(call)  # those before it never come
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        kind, state, answer = server.service.journal.answer(call.id, call.owner)
        if state != 0:
            break
        time.sleep(0.1)
    assert (kind, state) == ("optim_step", 2)
    assert b"the session of the model is over" in answer


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": [1, 2, 3, 400]}, "ids must be from 0 to"),
        ({"target_tokens": [1, 2, 3, 4], "weights": [1.0, 2.0]}, "must have 4 numbers"),
        (
            {"target_tokens": [1, 2, 3, 4], "weights": [1.0, 2.0, 3.0, NAN]},
            "must be finite",
        ),
        ({"weights": [1.0] * 4}, "'target_tokens'.*is required by this loss"),
    ],
)
def test_wrong_data_are_refused_and_the_model_goes_on(service, inputs, message):
    model = trainer(service)
    before = step(model, some()).metrics
    bad = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs=inputs)
    with pytest.raises(tinker.RequestFailedError, match=message) as error:
        model.forward_backward([bad], "cross_entropy").result()
    assert error.value.category == "user"
    assert step(model, some()).metrics["loss:sum"] < before["loss:sum"]


def test_wrong_calls_are_refused(service):
    model = trainer(service)
    with pytest.raises(tinker.BadRequestError, match="must be at most 8 here"):
        trainer(service, rank=9)
    with pytest.raises(tinker.BadRequestError, match="this server has 'tiny_char_model'"):
        service.create_lora_training_client("Qwen/Qwen3-8B", rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match="gspo.*must be one of cross_entropy"):
        model.forward_backward(some(), "gspo").result()
    with pytest.raises(tinker.RequestFailedError, match="clip_low_threshold.*has no settings"):
        model.forward(some(), "cross_entropy", {"clip_low_threshold": 0.1}).result()
    sampler = service.create_sampling_client(base_model=BASE).result()
    with pytest.raises(tinker.RequestFailedError, match="need more than max_model_len=128"):
        sampled(sampler, max_tokens=500)
