"""vLLM's side of gpu_rollout.py, run in a separate process: `grid`, `mix`, `mismatch` or `start` of one model.

Tuned for the workload: CUDA graphs up to the largest batch, a context no longer than needed, a separate engine process, tokens in
and out without a tokenizer. Each section tries one alternative and reports the faster one: in `grid` `flat_logprobs` (fewer objects
for the same log-probs; `mix` always uses it), in `mix` how responses end: by `stop_token_ids`, which vLLM looks up in a list for
every token, or by limits drawn from the same distribution, which cost nothing. Half of the prompts are enough to choose.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rollout_work import Turns, Work, config_of, grid_prompts, mismatch_prompts, mix_of, reporter, run_sections, wanted

GRID_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024]
# The batch shrinks as responses end. (Capturing takes a large part of the start-up.)
MIX_SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024]
MISMATCH_SIZES = [1, 2, 4, 8, 16, 32, 48, 64]


def start(job: dict, work: Work, *, max_model_len: int, sizes: list[int], prefix_caching: bool, folder: str | None = None):
    """The engine (with dummy weights if no folder is given), its settings, and its start-up time in seconds."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    settings = {
        "load_format": "auto" if folder else "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "max_num_seqs": work.max_sequences,
        "max_num_batched_tokens": 16384,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": job.get("memory_share", 0.85),
        "enable_prefix_caching": prefix_caching,
        "disable_log_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": max(sizes)},
    }
    if work.tiny:  # vLLM for the CPU
        del settings["compilation_config"], settings["gpu_memory_utilization"]
        settings |= {"enforce_eager": True, "max_num_batched_tokens": 256}
    began = time.perf_counter()
    if folder is None:
        folder = tempfile.mkdtemp(dir=Path(job["results"]).parent)
        (Path(folder) / "config.json").write_text(json.dumps(config_of(job["model"], work)))
    environment = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}  # vLLM adds its own
    llm = LLM(folder, **settings)
    return llm, {**settings, **environment}, time.perf_counter() - began


def params(flat: bool, **arguments):
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    if flat:
        arguments["flat_logprobs"] = True
    return SamplingParams(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False, **arguments)


def sampled(llm, prompts: list[list[int]], sampling) -> tuple[float, list]:
    """Seconds, and the outputs."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(given, sampling, use_tqdm=False)
    spent = time.perf_counter() - began
    made = [out for request in outputs for out in request.outputs]
    assert all(out.logprobs is not None and len(out.logprobs) == len(out.token_ids) for out in made), "log-probs are missing"
    return spent, made


def timed(llm, prompts: list[list[int]], sampling) -> tuple[float, int]:
    """Seconds, and the number of tokens generated."""
    spent, made = sampled(llm, prompts, sampling)
    return spent, sum(len(out.token_ids) for out in made)


def best_of(tries: dict, runs: int, measure) -> tuple[str, dict[str, list[float]], dict[str, list[int]]]:
    """One run of each variant, then more of the fastest until it has had `runs`; returns all rates and tokens by name."""
    rates: dict[str, list[float]] = {name: [] for name in tries}
    tokens: dict[str, list[int]] = {name: [] for name in tries}

    def once(name: str, run: int) -> None:
        spent, made = measure(tries[name], run)
        rates[name].append(made / spent)
        tokens[name].append(made)

    for number, name in enumerate(tries):
        once(name, 1 + number)
    best = max(rates, key=lambda name: rates[name][0])
    for run in range(1, runs):
        once(best, len(tries) + run)
    return best, rates, tokens


def grid(job: dict, work: Work, report) -> None:
    name, vocabulary = job["model"], config_of(job["model"], work)["vocab_size"]
    counts = [count for count in work.grid[name] if wanted(job, "grid", "vllm", name, str(count))]
    if not counts:
        return
    longest = max(1024, work.prompt_tokens + work.new_tokens)
    llm, settings, start_s = start(job, work, max_model_len=longest, sizes=GRID_SIZES, prefix_caching=False)
    tries = {"log-probs as objects": False, "flat_logprobs": True}
    for sequences in counts:
        prompts = grid_prompts(vocabulary, sequences, work.prompt_tokens)
        timed(llm, prompts, params(False, max_tokens=min(32, work.new_tokens)))  # to warm up
        turns = Turns(job, "vllm", str(sequences))

        def measure(flat: bool, run: int, prompts: list[list[int]] = prompts) -> tuple[float, int]:
            return timed(llm, prompts, params(flat, max_tokens=work.new_tokens))

        def in_turn(flat: bool, run: int, turns: Turns = turns) -> tuple[float, int]:
            with turns.turn():
                return measure(flat, run)

        if turns.folder is not None and len(tries) > 1:  # choose before the runs that alternate
            best, _, _ = best_of(tries, 1, measure)
            tries = {best: tries[best]}
        turns.ready()
        best, rates, tokens = best_of(tries, job["runs"], in_turn)
        turns.end()
        assert all(made == sequences * work.new_tokens for runs in tokens.values() for made in runs), "a response ended early"
        report(
            "grid", "vllm", name, str(sequences), tokens=sequences * work.new_tokens, rates=rates[best], tried=rates, best=best,
            start_s=start_s, settings=settings,
        )  # fmt: skip
        tries = {best: tries[best]}  # the faster variant does not depend on the batch size


def mix(job: dict, work: Work, report) -> None:
    name, vocabulary = job["model"], config_of(job["model"], work)["vocab_size"]
    if not wanted(job, "mix", "vllm", name):
        return
    longest = work.mix_prompt_tokens[1] + work.mix_new_tokens[1]
    llm, settings, start_s = start(job, work, max_model_len=longest, sizes=MIX_SIZES, prefix_caching=True)

    def measure(way: str, run: int, count: int | None = None, longest: int | None = None) -> tuple[float, int]:
        """Tokens/s and the number of tokens; optionally of the first `count` prompts, or with responses of at most `longest`."""
        load = mix_of(vocabulary, work, run)
        if way == "drawn limits":
            pairs = [(prompt, length) for prompt, drawn in zip(load.prompts, load.drawn, strict=True) for length in drawn]
            pairs = pairs[: count and count * work.mix_n]
            prompts, limits, more = [prompt for prompt, _ in pairs], [length for _, length in pairs], {}
        else:
            prompts, limits, more = (
                load.prompts[:count],
                load.limits[:count],
                {"n": work.mix_n, "stop_token_ids": load.ends},
            )
        spent, made = timed(llm, prompts, [params(True, max_tokens=min(limit, longest or limit), **more) for limit in limits])
        print(f"{way}: {made} tokens of {len(prompts)} requests in {spent:.1f} s", flush=True)  # to the log
        return made / spent, made

    ways = ("stop_token_ids", "drawn limits")
    for way in ways:  # to warm up: everything is compiled and captured by now, so short responses are enough
        measure(way, 0, count=work.mix_warm_prompts, longest=work.mix_warm_tokens)
    # Choose the faster way on half of the prompts. The timed runs use other prompts, the same as the native engine's.
    tried = {way: measure(way, job["runs"] + 1 + i, count=work.mix_prompts // 2)[0] for i, way in enumerate(ways)}
    best = max(ways, key=lambda way: tried[way])
    rates, tokens = zip(*(measure(best, 1 + run) for run in range(job["runs"])), strict=True)
    found = {"rates": rates, "tokens": tokens, "best": best, "start_s": start_s}
    found["tried"] = {f"{way} (half of the prompts)": [rate] for way, rate in tried.items()}
    report("mix", "vllm", name, **found, settings={"flat_logprobs": True, **settings})


def mismatch(job: dict, work: Work, report) -> None:
    """Write samples with their log-probs to a file; the trainer's side computes its log-probs of the same tokens."""
    longest = work.mismatch_prompt_tokens[1] + work.mismatch_new_tokens
    sizes, prompts = MISMATCH_SIZES, mismatch_prompts(config_of(job["model"], work)["vocab_size"], work)
    llm, settings, start_s = start(job, work, max_model_len=longest, sizes=sizes, prefix_caching=False, folder=job["folder"])
    _, made = sampled(llm, prompts, params(False, max_tokens=work.mismatch_new_tokens))
    assert all(len(out.token_ids) == work.mismatch_new_tokens for out in made), "a response ended early"
    samples = [
        {
            "tokens": list(out.token_ids),
            "logprobs": [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)],
        }
        for out in made
    ]
    found = {"about": about(), "settings": settings, "start_s": start_s, "prompts": prompts, "samples": samples}
    Path(job["samples"]).write_text(json.dumps(found))


def first_token(job: dict, work: Work, report) -> None:
    """Default settings, a complete model folder, one token per prompt."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(job["folder"], **({"enforce_eager": True, "max_model_len": 512} if work.tiny else {}))
    chats = [[{"role": "user", "content": text}] for text in job["prompts"]]
    outputs = llm.chat(chats, SamplingParams(temperature=1.0, max_tokens=1, logprobs=0), use_tqdm=False)
    assert all(len(request.outputs[0].token_ids) == 1 for request in outputs)
    report("first token", "vllm", job["model"], at=time.time())


SECTIONS = {"grid": grid, "mix": mix, "mismatch": mismatch, "start": first_token}


def about() -> str:
    """Machine and versions."""
    # Not torch.cuda: a CUDA context in this process would change how vLLM starts its engine process.
    from importlib.metadata import version

    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    versions = f"torch {version('torch')}, transformers {version('transformers')}"
    return f"{current_platform.get_device_name()}, vLLM {vllm.__version__}, {versions}"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    print(about(), flush=True)
    run_sections(job, SECTIONS, reporter(job, about()), "vllm")


if __name__ == "__main__":
    main()
