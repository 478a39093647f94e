"""`train.tokens_per_micro_batch: auto`: what the memory plan chooses, and that a run keeps it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import load as load_recipe
from plaudit.models.memory import plan_memory
from plaudit.models.shapes import QWEN, write_shape
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.train import auto
from plaudit.train.auto import MICRO_BATCHES, choose_micro_batch, resolve_auto, seconds_per_token
from plaudit.train.build import plan_training
from plaudit.train.memory_plan import plan_devices, update_size
from plaudit.train.processes import Processes
from plaudit.world import World
from support.ranks import start_ranks
from support.recipes import exact_metrics, pair_recipe, rl_recipe, sft_recipe, train_sft, write_recipe

H200, A100, SMALL = 149.3e9, 80e9, 24e9
REWARD = {"kind": "length", "unit": "characters", "at_most": 1, "slack": 8}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: write_shape(name, folder) for name in QWEN}


@pytest.fixture
def sft_of(shapes, rows_file, tmp_path):
    def load(
        shape: str, tokens: Any = "auto", *, rows: int = 512, max_tokens: int = 2048, train_more: Any = None, **sections: Any
    ) -> Any:
        """Steps of a million tokens, unless there are fewer rows."""
        train = {"rows_per_step": rows, "tokens_per_micro_batch": tokens, **(train_more or {})}
        tree = sft_recipe(shapes[shape], rows_file, tmp_path / "run", train=train, data={"max_tokens": max_tokens}, **sections)
        return load_recipe(write_recipe(tmp_path / "plan.yaml", {"stage": "sft", **tree})).recipe

    return load


def gpu(memory: float, **more: Any) -> Processes:
    return Processes(kind="cuda", memory=memory, **more)


def training(recipe: Any, processes: Processes) -> float:
    return plan_devices(recipe, None, processes)["cuda"].at("training", fixed_only=True)


def test_by_hand(sft_of):
    """18 bytes per parameter, 2 per kept activation, two chunks of logits, the head's gradient, CUDA."""

    def full(tokens: int) -> float:
        return 18 * 494_032_768 + tokens * 24 * 2 * (9 * 896 + 2 * 128 + 3 * 4864) + 8 * 2**28 + 4 * 151_936 * 896 + 0.6e9

    def kept(tokens: int) -> float:
        return full(tokens) + 4 * 151_936 * tokens

    for tokens in MICRO_BATCHES:
        assert training(sft_of("0.5B", tokens), gpu(H200)) == full(tokens)
        assert training(sft_of("0.5B", tokens, train_more={"keep_logits": True}), gpu(H200)) == kept(tokens)
    for memory, expected in [
        (H200, 32_768),
        (kept(32_768) / 0.75 + 1, 32_768),  # three quarters
        (kept(32_768) / 0.75 - 1, 16_384),  # and its logits, rather than more tokens without theirs
        (kept(16_384) / 0.75 - 1, 16_384),  # as usual, without its logits: nine tenths will do
        (full(16_384) / 0.9 + 1, 16_384),
        (full(16_384) / 0.9 - 1, 8_192),
        (SMALL, 8_192),
        (full(8_192) / 0.9 - 1, 4_096),
        (full(2_048) / 2, 2_048),  # too little for any
    ]:
        assert choose_micro_batch(sft_of("0.5B"), None, gpu(memory)) == expected, memory

    without = {"train_more": {"keep_logits": False}}
    for memory, expected in [
        (full(32_768) / 0.75 + 1, 32_768),
        (full(32_768) / 0.75 - 1, 16_384),
        (full(16_384) / 0.9 + 1, 16_384),
        (full(16_384) / 0.9 - 1, 8_192),
    ]:
        assert choose_micro_batch(sft_of("0.5B", **without), None, gpu(memory)) == expected, memory


def test_estimated_time_by_hand():
    """Of a billion parameters, of which 100 million are the head's."""
    plain = {"head_again": 0, "backward": 2, "gathered": False}
    assert seconds_per_token(10_000, 10**9, **plain) == pytest.approx(6e9 / 450e12 + (0.015 + 12e9 / 4.8e12) / 10_000)
    again = seconds_per_token(10_000, 10**9, **(plain | {"head_again": 10**8}))
    assert again - seconds_per_token(10_000, 10**9, **plain) == pytest.approx(2e8 / 450e12)
    gathered = seconds_per_token(10_000, 10**9, **(plain | {"gathered": True}))
    assert gathered - seconds_per_token(10_000, 10**9, **plain) == pytest.approx(8e9 / 3e11 / 10_000)
    assert seconds_per_token(10**9, 10**9, head_again=0, backward=1, gathered=False) == pytest.approx(4e9 / 450e12, rel=1e-3)


def test_where_weights_are_gathered_more_tokens_come_before_kept_logits(sft_of):
    """7B: 16,384 without its logits takes 107 of 149 GB, 8,192 with them 78."""
    sharded = gpu(H200, size=8, sharding="full")
    assert choose_micro_batch(sft_of("7B", rows=4096), None, sharded) == 16_384


def test_an_update_is_as_large_as_what_is_packed(tiny_model, prompts_file, tmp_path):
    """Prompts of 1,600 tokens × 8 × 64 tokens: 13,312 of their own, which fit a micro-batch, and 106,496 keys."""
    sections: dict[str, Any] = {"rollout": {"n": 8, "max_new_tokens": 64}, "train": {"prompts_per_step": 8}}

    def size(tokens: int, share: bool = True) -> Any:
        sections["train"] |= {"tokens_per_micro_batch": tokens, "share_prompts": share}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", REWARD, **sections)
        recipe = load_recipe(write_recipe(tmp_path / "packed.yaml", {"stage": "rl", **tree})).recipe
        return update_size(recipe, [1600] * 8)

    own, together = 8 * (1600 + 8 * 64), 8 * 8 * 1664
    assert size(32_768)[:2] == (own, True)
    assert size(together // 4)[:2] == (own, True)
    assert size(together // 4 - 1)[:2] == (own, False), "a batch has at most four keys for each token"
    assert size(32_768, share=False)[:2] == (32_768, False)


def test_logits_are_kept_if_they_fit(sft_of):
    """Four bytes for each token and each entry of the vocabulary, in three quarters of the memory, after everything else has been
    decided."""
    logits = 4 * 151_936 * 32_768

    def without(shape: str) -> float:
        return training(sft_of(shape, 32_768, train_more={"keep_logits": False}), gpu(H200))

    assert training(sft_of("0.5B", 32_768, train_more={"keep_logits": True}), gpu(H200)) == without("0.5B") + logits
    needed = without("0.5B") + logits
    for memory, expected in [(H200, True), (needed / 0.75 + 1, True), (needed / 0.75 - 1, False)]:
        lines: list[str] = []
        resolved = resolve_auto(sft_of("0.5B", 32_768), None, lines.append, gpu(memory))
        assert resolved.train.keep_logits is expected
        assert resolved.train.tokens_per_micro_batch == 32_768
        assert any("train.keep_logits: true, with which training takes about 68.1 GB of" in line for line in lines) == expected
    assert resolve_auto(sft_of("1.5B", 32_768), None, processes=gpu(H200)).train.keep_logits is False, "127 of 149 GB"
    small = resolve_auto(sft_of("0.5B", 1_000), None, processes=gpu(SMALL))
    assert small.train.keep_logits is True, "in micro-batches of any size"
    assert resolve_auto(sft_of("0.5B"), None, processes=Processes(kind="cpu")).train.keep_logits is False
    asked = sft_of("0.5B", train_more={"keep_logits": True})
    assert resolve_auto(asked, None, processes=gpu(SMALL)).train.keep_logits is True, "what the recipe says is not changed"


def test_larger_models_have_smaller_micro_batches(sft_of):
    lora, offloaded = {"model": {"lora": {"rank": 16}}}, {"optim": {"placement": "offload"}}

    def chosen(recipe: Any, memory: float) -> tuple[Any, Any]:
        train: Any = resolve_auto(recipe, None, processes=gpu(memory)).train
        return train.tokens_per_micro_batch, train.keep_logits

    assert chosen(sft_of("0.5B"), H200) == (32_768, True)
    assert chosen(sft_of("1.5B"), H200) == (16_384, True)
    assert chosen(sft_of("1.5B"), A100) == (16_384, False)
    assert chosen(sft_of("7B", **lora), H200) == (8_192, True)
    assert chosen(sft_of("7B", **lora), A100) == (4_096, True), "8,192 would take 73.0 GB of 80"
    assert chosen(sft_of("7B", **offloaded), H200) == (8_192, True)


def test_no_tensor_gets_too_many_elements(sft_of, monkeypatch):
    """Gate and up of 32,768 tokens at 7B have 1.2e9."""
    checkpointed = {"model": {"lora": {"rank": 16}, "gradient_checkpointing": True}}
    assert choose_micro_batch(sft_of("7B", **checkpointed), None, gpu(H200)) == 32_768
    monkeypatch.setattr(auto, "MOST_ELEMENTS", 1_200_000_000)
    assert choose_micro_batch(sft_of("7B", **checkpointed), None, gpu(H200)) == 16_384


def test_a_model_that_cannot_be_planned_is_trained_as_usual(sft_of, monkeypatch):
    def fail(*_: Any) -> None:
        raise ImportError("flash_attn is not installed")

    monkeypatch.setattr(auto, "plan_devices", fail)
    lines: list[str] = []
    assert resolve_auto(sft_of("0.5B"), None, lines.append, gpu(H200)).train.tokens_per_micro_batch == 16_384
    assert not lines


def test_no_more_than_an_update_has(sft_of):
    assert choose_micro_batch(sft_of("0.5B", rows=8), None, gpu(H200)) == 16_384, "which holds all of it"
    assert choose_micro_batch(sft_of("0.5B", rows=9), None, gpu(H200)) == 32_768
    assert choose_micro_batch(sft_of("0.5B", rows=9), None, gpu(H200, size=2)) == 16_384, "each process has half of it"
    assert choose_micro_batch(sft_of("0.5B", rows=512), [10] * 600, gpu(H200)) == 16_384, "as usual if that is enough"


def test_larger_ones_leave_others_their_memory(sft_of, tiny_model, prompts_file, tmp_path, monkeypatch):
    """Other processes, and judges that are launched on the same GPU; the usual number without logits does not depend on them."""
    with monkeypatch.context() as patch:
        for taken, expected in {55e9: 32_768, 65e9: 16_384, 140e9: 16_384}.items():
            patch.setattr(Processes, "taken_by_others", lambda _, taken=taken: taken)
            assert choose_micro_batch(sft_of("0.5B"), None, gpu(H200)) == expected

    def rl(share: float, lag: int = 0, **model: Any) -> int:
        served = {"path": str(tiny_model), "placement": "launch", "arguments": [f"--gpu-memory-utilization {share}"], **model}
        judge = {"kind": "scalar_model", "name": "score", "model": served}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", judge)
        tree |= {"train": {"prompts_per_step": 999}, "rollout": {"n": 99, "lag": lag}}
        return choose_micro_batch(load_recipe(write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})).recipe, None, gpu(A100))

    assert rl(0.2) == 32_768
    assert rl(0.99) == 16_384
    assert rl(0.2, lag=1) == 16_384, "the next step is sampled and scored meanwhile"
    assert rl(0.9, sleep=True) == 32_768, "it leaves before an update"


def test_a_long_sequence_takes_its_memory_in_any_case(sft_of):
    """Halves below it would cost time and save nothing."""
    long = {"max_tokens": 20_000}
    assert choose_micro_batch(sft_of("0.5B", **long), None, gpu(1e9)) == 16_384
    assert choose_micro_batch(sft_of("0.5B", max_tokens=500_000), None, gpu(1e9)) == 32_768
    assert choose_micro_batch(sft_of("0.5B", **long), None, gpu(H200)) == 32_768


def test_layers_are_checkpointed_where_4096_tokens_do_not_fit(sft_of):
    lora = {"model": {"lora": {"rank": 16}, "gradient_checkpointing": "auto"}}

    def resolve(memory: float, **more: Any) -> tuple[Any, Any]:
        resolved = resolve_auto(sft_of("7B", **lora), None, lambda line: None, gpu(memory, **more))
        return resolved.train.tokens_per_micro_batch, resolved.model.gradient_checkpointing

    enough = training(sft_of("7B", 4_096, **lora), gpu(H200)) / 0.9
    assert resolve(H200) == (8_192, False)
    assert resolve(enough + 1) == (4_096, False)
    assert resolve(enough - 1) == (4_096, 1), "a layer is enough"
    tokens, layers = resolve(0.6 * enough)
    assert tokens == 2_048
    assert layers > 20

    # Sharded weights are gathered for every micro-batch.
    sharded = {"size": 8, "sharding": "full"}
    enough = training(sft_of("7B", 16_384, **lora), gpu(H200, **sharded)) / 0.9
    assert resolve(enough + 1, **sharded) == (16_384, False)
    assert resolve(enough - 1, **sharded) == (16_384, 1)


def test_the_number_fits_or_is_the_smallest_and_a_larger_one_would_not(sft_of):
    """By the plan's own measure, whatever the settings."""
    draw = random.Random(0)
    for _ in range(20):
        memory, checkpointing = draw.uniform(6e9, 130e9), draw.choice([False, True, 9, "auto"])
        model = {"lora": draw.choice([None, {"rank": 16}]), "gradient_checkpointing": checkpointing}
        size = draw.choice([1, 4])
        processes = gpu(memory, size=size, sharding="none" if size == 1 else draw.choice(["none", "optimiser", "full"]))
        sizes = {
            "rows": draw.choice([1, 8, 64, 512]),
            "max_tokens": draw.choice([500, 3000, 9000]),
            "train_more": {"keep_logits": False},
        }
        resolved: Any = resolve_auto(sft_of("0.5B", model=model, **sizes), None, lambda line: None, processes)
        tokens = resolved.train.tokens_per_micro_batch
        why = (memory, model, processes, sizes, tokens)
        assert tokens in MICRO_BATCHES
        if training(resolved, processes) > (0.75 if tokens > 16_384 else 0.9) * memory:
            assert tokens == min(size for size in MICRO_BATCHES if 2 * size > sizes["max_tokens"]), why
        if tokens < 32_768 and checkpointing != "auto":
            larger = sft_of("0.5B", 2 * tokens, model=model, **sizes)
            needless = tokens >= 16_384 and size * tokens >= sizes["rows"] * sizes["max_tokens"]
            assert needless or training(larger, processes) > (0.75 if tokens >= 16_384 else 0.9) * memory, why


def test_nothing_faster_fits(sft_of):
    """Of all numbers and with or without kept logits, by estimated time and the plan's own measure."""
    draw = random.Random(1)
    for _ in range(12):
        memory, shape, full = draw.uniform(20e9, 150e9), draw.choice(["0.5B", "1.5B", "7B"]), draw.choice([False, True])
        model = {"lora": draw.choice([None, {"rank": 16}])}
        processes = gpu(memory, size=8, sharding="full") if full else gpu(memory)
        resolved: Any = resolve_auto(sft_of(shape, model=model), None, lambda line: None, processes)
        parameters, head = {"0.5B": (494_032_768, 896), "1.5B": (1_543_714_304, 1536), "7B": (7_615_616_512, 3584)}[shape]

        def seconds(tokens: int, keeps: bool, p=parameters, h=head, model=model, full=full) -> float:
            vocabulary = 152_064 if h == 3584 else 151_936
            again = 0 if keeps else vocabulary * h
            return seconds_per_token(tokens, p, again, backward=1 if model["lora"] else 2, gathered=full)

        chosen = resolved.train.tokens_per_micro_batch, resolved.train.keep_logits
        for tokens in MICRO_BATCHES:
            for keeps in (False, True) if tokens >= 4_096 else (False,):
                if seconds(tokens, keeps) < 0.999 * seconds(*chosen):
                    faster = sft_of(shape, tokens, model=model, train_more={"keep_logits": keeps})
                    limit = (0.75 if keeps or tokens > 16_384 else 0.9) * memory
                    assert training(faster, processes) > limit, (memory, shape, model, processes, chosen, tokens, keeps)


def test_a_number_is_used_as_it_is_and_unknown_memory_gives_the_usual_one(sft_of):
    given, lines = sft_of("7B", 100_000, train_more={"keep_logits": False}), []
    assert resolve_auto(given, None, lines.append, gpu(1e9)) == given
    assert not lines
    assert resolve_auto(sft_of("0.5B"), None, processes=gpu(float("inf"))).train.keep_logits is False
    assert choose_micro_batch(sft_of("0.5B"), None, gpu(float("inf"))) == 16_384
    assert choose_micro_batch(sft_of("72B"), None, Processes()) == 16_384, "on a CPU"
    unreadable = sft_of("0.5B").model_copy(update={"model": ModelSettings(path="missing")})
    assert choose_micro_batch(unreadable, None, gpu(H200)) == 16_384


# Keys of shared prompts -----------------------------------------------------------------------------------------------


def test_keys_of_shared_prompts_by_hand(tiny_model, pairs_file, prompts_file, tmp_path):
    def keys(stage: str, tree: dict, lengths: list[int]) -> int:
        return update_size(load_recipe(write_recipe(tmp_path / "keys.yaml", {"stage": stage, **tree})).recipe, lengths).keys

    def rl(n: int, lengths: list[int], tokens: int = 1000, **train: Any) -> int:
        sections = {"rollout": {"n": n, "max_new_tokens": 10}, "train": {"tokens_per_micro_batch": tokens, **train}}
        return keys("rl", rl_recipe(tiny_model, prompts_file, tmp_path / "run", REWARD, **sections), lengths)

    assert rl(8, [100] * 3) == 8 * 3 * 110, "all keys of an update"
    assert rl(64, [100] * 3) == 4 * 1000, "a batch has at most four for each token"
    assert rl(2, [900] * 3) == 2 * 1000, "or as many as sequences share it"
    assert rl(8, [2000] * 3) == 4 * 1000, "a longer sequence shares nothing"
    assert rl(8, [100] * 3, share_prompts=False) == 0

    def dpo(lengths: list[int]) -> int:
        train = {"pairs_per_step": 4, "tokens_per_micro_batch": 1000}
        return keys("dpo", pair_recipe(tiny_model, pairs_file, tmp_path / "run", train=train), lengths)

    assert dpo([100] * 4) == 400
    assert dpo([900] * 4) == 2 * 1000
    assert dpo([3000] * 4) == 3000, "a pair that is a micro-batch by itself"


def test_copied_keys_take_memory(shapes):
    """In the attention kernel those of one layer, with gradients for every query head, instead of a chunk of logits; elsewhere
    layers keep them."""
    q, k, layers, head = 3584, 512, 28, 4 * 152_064 * 3584

    def passes(keys: int, device: str = "cuda", lora: LoraSettings | None = None, **model: Any) -> tuple[float, float]:
        settings = ModelSettings(path=str(shapes["7B"]), dtype="bfloat16", lora=lora, **model)
        plan = plan_memory(settings, torch.device(device), micro_batch=100_000, keys=keys)
        return plan.logits, plan.activations

    logits, kept = passes(0)
    assert logits == 2 * 4 * 2**28 + head
    assert passes(100_000) == (logits, kept), "1.8 GB: a chunk takes more"
    assert passes(400_000) == (400_000 * 2 * (4 * k + 2 * q) + head, kept)
    assert passes(0, lora=LoraSettings(rank=4))[0] == 2**31
    logits, kept = passes(0, "cpu")
    assert logits == 2**23 * 8 + head
    assert passes(400_000, "cpu") == (logits, kept + layers * 300_000 * 2 * k * 2)
    assert (
        passes(400_000, "cpu", gradient_checkpointing=True)[1] == passes(0, "cpu", gradient_checkpointing=True)[1] + 300_000 * 4 * k
    )


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tiny_model, rows_file, tmp_path):
    def write(name: str, tokens: Any = "auto", **sections: Any) -> Path:
        settings = {"train": {"tokens_per_micro_batch": tokens}, "run": {"max_steps": 4, "save_every": 2}, **sections}
        return write_recipe(
            tmp_path / f"{name}.yaml", {"stage": "sft", **sft_recipe(tiny_model, rows_file, tmp_path / name, **settings)}
        )

    return write


def recorded(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())["tokens_per_micro_batch"]


def assert_same_run(run: Path, reference: Path) -> None:
    assert (run / "model/model.safetensors").read_bytes() == (reference / "model/model.safetensors").read_bytes()
    assert exact_metrics(run) == exact_metrics(reference)


def test_on_a_cpu_it_is_16384_as_ever(recipe, tmp_path, capsys):
    train_sft(recipe("auto"))
    assert "tokens_per_micro_batch" not in capsys.readouterr().err
    train_sft(recipe("given", 16_384))
    assert_same_run(tmp_path / "auto", tmp_path / "given")
    assert recorded(tmp_path / "auto") == recorded(tmp_path / "given") == 16_384


def test_a_resumed_run_keeps_its_number(recipe, tmp_path, monkeypatch, capsys):
    """Even if there is less memory now, or the run is from before `auto` and had a default."""
    train_sft(recipe("reference", 128))
    for name, first in {"auto": "auto", "older": 128}.items():
        monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 128)
        _stop_after(2, monkeypatch, recipe(name, first))
        if name == "older":
            description = json.loads((tmp_path / "older/run.json").read_text())
            del description["tokens_per_micro_batch"]
            (tmp_path / "older/run.json").write_text(json.dumps(description))
        monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 64)
        capsys.readouterr()
        train_sft(recipe(name))
        assert recorded(tmp_path / name) == 128
        assert_same_run(tmp_path / name, tmp_path / "reference")
        printed = " ".join(capsys.readouterr().err.split())
        assert "this run keeps the 128 tokens per micro-batch that it was last trained with; auto would now be 64" in printed
        assert "changed settings" not in printed


def test_a_resumed_run_on_the_same_device_says_nothing_of_its_number(recipe, monkeypatch, capsys):
    _stop_after(2, monkeypatch, recipe("run"))
    train_sft(recipe("run"))
    assert "per micro-batch" not in capsys.readouterr().err


class Stopped(Exception):
    pass


def _stop_after(step: int, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    from plaudit.run import Run

    log = Run.log

    def log_or_stop(self: Run, done: int, metrics: dict[str, float]) -> dict[str, float]:
        if done > step:
            raise Stopped
        return log(self, done, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "log", log_or_stop)
        with pytest.raises(Stopped):
            train_sft(file)


def test_a_number_given_later_replaces_the_recorded_one(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 128)
    _stop_after(2, monkeypatch, recipe("run"))
    train_sft(recipe("run", 64))
    assert "train.tokens_per_micro_batch: was 128, is now 64" in capsys.readouterr().err
    assert recorded(tmp_path / "run") == 64


def test_a_run_without_results_chooses_again(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 128)
    _stop_after(0, monkeypatch, recipe("run"))
    assert recorded(tmp_path / "run") == 128
    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 64)
    train_sft(recipe("run"))
    assert recorded(tmp_path / "run") == 64


class NextToASmallerGPU(World):
    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, 4_096]


def test_the_smallest_number_of_all_processes_is_used(sft_of):
    world = NextToASmallerGPU.alone()
    assert plan_training(sft_of("0.5B"), None, world)[2] == 4_096
    assert plan_training(sft_of("0.5B"), None, world, recorded_micro_batch=32_768)[2] == 32_768
    assert plan_training(sft_of("0.5B", 1000), None, world, recorded_micro_batch=32_768)[2] == 1000


OTHER_GPU = """
from plaudit.cli import main
from plaudit.train import auto
auto.choose_micro_batch = lambda *_: {tokens}
main()
"""


@pytest.mark.slow
def test_processes_agree_on_the_smallest(recipe, tmp_path):
    file = recipe("run", run={"max_steps": 1})
    ranks = start_ranks(2, "sft", file, scripts={rank: OTHER_GPU.format(tokens=tokens) for rank, tokens in enumerate((256, 64))})
    assert not [rank.output for rank in ranks if rank.wait()]
    assert recorded(tmp_path / "run") == 64


def test_running_out_of_memory_reports_the_number(plaudit, recipe, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("reason. More words")

    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 65_536)
    with monkeypatch.context() as patch:
        patch.setattr("plaudit.train.trainer.Trainer.update", fail)
        _, _, err = plaudit("sft", recipe("run"))
    assert "out of GPU memory (reason). Lower train.tokens_per_micro_batch (now 65,536)" in err
    monkeypatch.setattr("plaudit.loops.sft.load_policy", fail)
    assert "Lower train.tokens_per_micro_batch (now auto)" in plaudit("sft", recipe("early"))[2]


@pytest.mark.parametrize(
    ("lora", "tokens", "kept", "advice"),
    [
        (None, 16_384, True, "Set train.keep_logits=false, lower train.tokens_per_micro_batch (now 16,384), set model.grad"),
        (None, 16_384, False, "Lower train.tokens_per_micro_batch (now 16,384), set model.grad"),
        (None, 2_048, False, "Set model.gradient_checkpointing=true, set optim.placement=offload, or use model.lora. `plaudit"),
        ({"rank": 4}, 2_048, True, "Set train.keep_logits=false, set model.gradient_checkpointing=true, set optim"),
        ({"rank": 4}, 2_048, False, "Set model.gradient_checkpointing=true, set optim.placement=offload, or set model.lora.base"),
        ({"rank": 4, "base_bits": 4}, 2_048, False, "or choose a smaller model."),
    ],
)  # fmt: skip
def test_running_out_of_memory_suggests_what_is_left(plaudit, recipe, monkeypatch, tmp_path, lora, tokens, kept, advice):
    """First what keeps every bit; nothing that the run does already."""

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("reason. More words")

    def resolve(*arguments: Any, **options: Any) -> Any:
        resolved = resolve_auto(*arguments, **options)
        return resolved.model_copy(update={"train": resolved.train.model_copy(update={"keep_logits": kept})})

    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: tokens)
    monkeypatch.setattr("plaudit.train.build.resolve_auto", resolve)
    monkeypatch.setattr("plaudit.train.trainer.Trainer.update", fail)
    message = plaudit("sft", recipe("run", model={"lora": lora}))[2]
    assert f"out of GPU memory (reason). {advice}" in message if advice[0].isupper() else advice in message
    run = tmp_path / "run/run.json"
    assert json.loads(run.read_text())["resolved"] == {"train.tokens_per_micro_batch": tokens, "train.keep_logits": kept}


def test_checkpointing_suggests_no_smaller_micro_batch_than_there_is(sft_of):
    lines: list[str] = []
    lora = {"model": {"lora": {"rank": 16}, "gradient_checkpointing": "auto"}}
    resolve_auto(sft_of("7B", 2_048, max_tokens=1000, **lora), None, lines.append, gpu(10e9))
    resolve_auto(sft_of("7B", 4_096, max_tokens=1000, **lora), None, lines.append, gpu(10e9))
    resolve_auto(sft_of("7B", 4_096, max_tokens=5000, **lora), None, lines.append, gpu(10e9))
    savers = [line.partition("which may be too much: ")[2] for line in lines]
    others = "set optim.placement=offload or set model.lora.base_bits=4"
    assert savers == [others, f"lower train.tokens_per_micro_batch or {others}", others]


# The doctor -----------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_what_auto_is(plaudit, recipe, tmp_path):
    def doctor(*settings: str) -> str:
        return " ".join(plaudit("doctor", recipe("run", run={"device": "auto"}), *settings)[1].split())

    line = "train.tokens_per_micro_batch: 16,384, with which training takes about"
    assert line in doctor("--gpu-memory", "80")
    assert "tokens_per_micro_batch: 32,768" in doctor("--gpu-memory", "80", "train.rows_per_step=1000")
    assert "train.tokens_per_micro_batch" not in doctor("--gpu-memory", "80", "train.tokens_per_micro_batch=512")
    small = doctor("--gpu-memory", "1")
    assert "which may be too much: set model.gradient_checkpointing=true or set optim.placement=offload or use model.lora" in small
    plaudit("doctor", recipe("run"), "--gpu-memory", "80", "--html", tmp_path / "doctor.html")
    assert line in (tmp_path / "doctor.html").read_text()
