"""The kernels compile for GPUs, which needs no GPU: the compiler may reject what the interpreter accepts.

They are compiled in a separate process, because other tests may run Triton's interpreter. The PTX is checked too: the cache must be
read with asynchronous copies of 16 bytes, which bypass the registers, or attention takes twice as long.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="kernels need Triton; the dev extra installs it on machines without a GPU")

COMPILE = """
import gc, json, re, sys
gc.disable()  # a tenth of the time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from plaudit.models.kernels import attention as packed, attention_backward as backward, layers as shared, merging, vocabulary
from plaudit.models.kernels.compile_options import NO_FP_FUSION
from plaudit.rollout.native.kernels import attention, draw, layers, top_k

WIDE = {"query_stride", "query_head_stride", "tables_stride", "block_stride", "layer_offset", "value_offset", "qkv_stride",
        "logits_stride", "part_tokens", "key_stride", "key_head_stride", "value_stride", "value_head_stride"}
TYPES = {"base_ptr": "i64", "rows_ptr": "i64", "positions_ptr": "i64", "tables_ptr": "i32", "tokens_ptr": "i32", "ends_ptr": "i64",
         "results_ptr": "i32", "numbers_ptr": "fp32", "floor_ptr": "fp32", "logits_ptr": "fp32", "sums_ptr": "fp32",
         "starts_q_ptr": "i32", "starts_k_ptr": "i32", "logsum_ptr": "fp32", "copies_ptr": "i32", "starts_ptr": "i32",
         "a_ptr": "fp32", "b_ptr": "fp32", "scales_ptr": "fp32", "levels_ptr": "fp32"}
FLOATS = {"eps", "scale", "temperature"}


def type_of(name, dtype, types):
    if name in types:
        return types[name]
    if name in FLOATS:
        return "fp32"
    return "*" + TYPES.get(name, dtype) if name.endswith("_ptr") else "i32"


def compiled(kernel, dtype, capability, constants, options, also_wide=frozenset(), **types):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, dtype, types) for name in names}
    wide_names = WIDE | also_wide | {name for name in names if signature[name][0] == "*"}
    wide = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in wide_names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, wide)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found.append({
        "kernel": kernel.fn.__module__.split(".")[1] + kernel.fn.__name__, "dtype": dtype, "capability": capability,
        "constants": constants,
        "cubin": len(built.asm["cubin"]), "shared": built.metadata.shared,
        "stored": sorted(set(re.findall(r"st[.]global[.](\\S+)", built.asm["ptx"]))),
        "order": [line[0] for line in re.findall(r"(st[.]global|bar[.]sync|cp[.]async[.]c[ag])()", built.asm["ptx"])],
        "copies": sorted(set(re.findall(r"cp[.]async[.]c[ag][.]shared[.]global[^;]*?, (0x[0-9a-f]+)[,;]", built.asm["ptx"]))),
    })


found = []
for capability in (80, 90):
    kinds = None if capability == 90 else 1  # of a kernel: the older one is there for instructions that it lacks, and takes long
    shapes = (("bf16", 128, 28, 4), ("bf16", 64, 14, 2), ("bf16", 256, 8, 4), ("fp32", 64, 4, 4))
    for dtype, size, heads, kv in shapes[:kinds]:
        shape = {"HEADS": heads, "GROUP": heads // kv, "D": size, "WIDTH": size, "BLOCK": 4096 // size, "STRETCH": 256}
        warps = attention.warps_for(16, size, 4 if dtype == "fp32" else 2)
        tuned = {"num_warps": warps, "num_stages": attention.STAGES} | NO_FP_FUSION
        # All five take half a minute; elsewhere the one that has everything.
        usual = capability == 90 and dtype == "bf16" and size < 256
        variants = (
            (True, True, True, False), (True, False, False, False), (False, True, False, False), (True, False, False, True),
            (True, True, False, True),
        )  # fmt: skip
        for rotate, split, window, shared_prefixes in variants[: 5 if usual else 1]:
            constants = shape | {"KV": kv, "ROWS": 16, "ROTATE": rotate, "SPLIT": split, "WINDOW": window}
            kept = "*fp32" if split or shared_prefixes else "*" + dtype
            parts = {"parts_ptr": kept, "sums_ptr": kept, "shared_ptr": "*i32" if shared_prefixes else "*i64"}
            compiled(attention._attend, dtype, capability, constants | {"SHARED": shared_prefixes}, tuned, **parts)
        if usual:
            samples = {"SAMPLES": 64 // (heads // kv), "ROWS": 64, "ROTATE": size == 128}
            parts = {"tiles_ptr": "*i32", "parts_ptr": "*fp32", "sums_ptr": "*fp32"}
            tiled = {"num_warps": attention.PREFIX_WARPS, "num_stages": attention.PREFIX_STAGES} | NO_FP_FUSION
            compiled(attention._attend_prefix, dtype, capability, shape | samples, tiled, **parts)
        combine = {"HEADS": heads, "D": size, "WIDTH": size, "STRETCH": 256, "WINDOW": False}
        compiled(attention._combine, dtype, capability, combine, {"num_warps": 1} | NO_FP_FUSION, parts_ptr="*fp32")
        tuned = {"num_warps": packed.WARPS, "num_stages": packed.STAGES} | NO_FP_FUSION
        compiled(packed._attend, dtype, capability, shape | {"ROWS": packed.ROWS}, tuned)
        if capability == 90 and dtype == "bf16":
            of_shape = {"HEADS": heads, "GROUP": heads // kv, "D": size, "WIDTH": size, "PADDING": backward.PADDING}
            for use_tma in (True, False)[: 2 if size == 128 else 1]:
                tilings = (backward._grad_query, backward.QUERY_TILINGS), (backward._grad_key, backward.KEY_TILINGS)
                for kernel, by_size in tilings:
                    tiling, names = by_size[size], ("query", "grad", "out", "key", "value")
                    of_keys = kernel is backward._grad_key
                    rows, block = (tiling.streamed, tiling.kept) if of_keys else (tiling.kept, tiling.streamed)
                    types = {name: f"tensordesc<bf16[{block if name in names[3:] else rows}, {size}]>" for name in names}
                    types |= {"rows": f"tensordesc<fp32[{rows}]>"}
                    if not use_tma:
                        types = dict.fromkeys(names, "*bf16") | {"rows": "*fp32"}
                    constants = of_shape | {"TMA": use_tma, "ROWS": rows, "BLOCK": block}
                    constants |= {"SPLIT": 1, "VALUE_LAST": tiling.value_last} if of_keys else {}
                    compiled(kernel, dtype, capability, constants, tiling.options, **types, rows_ptr="*fp32")
        fp32 = {"x_ptr": "*fp32", "summed_ptr": "*fp32", "grad_x_ptr": "*fp32", "grad_ptr": "*fp32", "grad_weight_ptr": "*fp32"}
        compiled(shared._add_norm, dtype, capability, {"D": 896, "BLOCK": 1024, "PARTS": 2}, NO_FP_FUSION, **fp32)
        compiled(shared._add, dtype, capability, {"BLOCK": 1024}, NO_FP_FUSION, x_ptr="*fp32", summed_ptr="*fp32")
        for trains in (True, False):
            norm = {"D": 896, "BLOCK": 1024, "ADD": True, "ROUND": True, "TRAINS": trains}
            compiled(shared._norm_backward, dtype, capability, norm, {}, **fp32)
        compiled(shared._swiglu, dtype, capability, {"HALF": 4864, "BLOCK": 1024}, NO_FP_FUSION)
        compiled(shared._swiglu_backward, dtype, capability, {"HALF": 4864, "BLOCK": 1024}, {})
        compiled(shared._join_parts, dtype, capability, {"PARTS": 2, "BLOCK": 1024}, NO_FP_FUSION, parts_ptr="*fp32")
        rotate = {"TURNED": heads + kv, "D": size, "HALF": size // 2, "AT_ONCE": 4}
        compiled(packed._sum_copies, dtype, capability, {"WIDTH": kv * size, "BLOCK": kv * size}, {"num_warps": 2})
        compiled(shared._rotate, dtype, capability, rotate, {"num_warps": 2} | NO_FP_FUSION)
        norms = {"QUERY": heads, "TURNED": heads + kv, "D": size, "WIDTH": size, "AT_ONCE": 4}
        compiled(shared._norm_heads, dtype, capability, norms, {"num_warps": 2} | NO_FP_FUSION)
        rows = {"rows_ptr": "*i32"}
        write = {"KV": kv, "HEADS": kv, "D": size, "WIDTH": size, "BLOCK": 64}
        compiled(layers._write, dtype, capability, write, {"num_warps": 2}, **rows)
    row = {"COLUMNS": 5, "TILE": 4096}
    for tempered, at_once, floor in ((False, False, False), (True, True, True))[:kinds]:
        read = row | {"TEMPERED": tempered, "AT_ONCE": at_once, "FLOOR": floor}
        compiled(draw._read, "fp32", capability, read, {"num_warps": 8} | NO_FP_FUSION)
    for dtype, aligned in (("bf16", True), ("bf16", False), ("fp32", True))[:kinds]:
        tile = {"ROWS": merging.ROWS if aligned else merging.FEW_ROWS, "COLUMNS": merging.COLUMNS}
        tuned, wide = {"num_warps": merging.WARPS} | NO_FP_FUSION, {"columns"} if aligned else set()
        for one in ({}, {"rank": 1}):
            compiled(merging._merge, dtype, capability, tile | one, tuned, wide)
        for four, merge in ((True, True), (False, True), (True, False)):
            kind = {"FOUR_BITS": four, "MERGE": merge, "ALIGNED": aligned}
            codes = "*u8" if four else "*i8"
            compiled(merging._dequantise_merge, dtype, capability, tile | kind, tuned, wide, codes_ptr=codes)
    tile, warps, tokens = {"TILE": 4096}, {"num_warps": vocabulary.WARPS}, {"tokens_ptr": "*i64"}
    for tempered in (False, True)[:kinds]:
        compiled(vocabulary._sum_tiles, "fp32", capability, tile | {"TEMPERED": tempered}, warps | NO_FP_FUSION)
        settled = {"MANY": 64, "TEMPERED": tempered}
        compiled(vocabulary._settle, "fp32", capability, settled, {"num_warps": 1} | NO_FP_FUSION, **tokens)
        compiled(vocabulary._gradients, "fp32", capability, tile | {"ENTROPY": tempered}, warps, **tokens, grad_ptr="*bf16")
    for many, one in ((top_k.MOST, {}), (32, {}), (1, {"k": 1, "number": 1}))[:kinds]:  # 1 becomes a constant
        block = {"COLUMNS": 5, "MANY": many, "BLOCK": top_k.BLOCK} | one
        compiled(top_k._kth, "fp32", capability, block, {"num_warps": 8}, chosen_ptr="*i32")
        choose = {"COLUMNS": 5, "MANY": 4096} | {name: value for name, value in one.items() if name == "k"}
        compiled(top_k._choose, "fp32", capability, choose, {"num_warps": 8}, chosen_ptr="*i32")
    peaks = {"COLUMNS": 5, "BLOCK": top_k.BLOCK, "AT_ONCE": top_k.BLOCKS_AT_ONCE}
    compiled(top_k._peaks, "fp32", capability, peaks, {"num_warps": 8})
    of_round = {"winner_ptr": "*i32", "above_ptr": "*i64", "fastest_ptr": "*i32"}
    of_rounds = of_round | {"last_" + name: type for name, type in of_round.items()}
    for floor, programs in ((True, 32), (False, 4))[:kinds]:
        constants = row | {"MANY": 64, "PROGRAMS": programs, "FLOOR": floor}
        for first in (True, False):
            compiled(draw._narrow, "fp32", capability, constants | {"FIRST": first}, {"num_warps": 8}, **of_rounds)
        compiled(draw._accept, "fp32", capability, constants, {"num_warps": 8}, **of_round)
    statuses = {"RUNNING": 1, "ENDED": 2, "AT_LIMIT": 3}
    settle = row | {"MANY": 64, "ENDS": 3, "MANY_ENDS": 4} | statuses
    for tempered, at_once, greedy, warps in ((True, False, False, 8), (True, True, False, 1), (False, False, True, 8))[:kinds]:
        kind = {"TEMPERED": tempered, "AT_ONCE": at_once, "GREEDY": greedy}
        compiled(draw._settle, "fp32", capability, settle | kind, {"num_warps": warps} | NO_FP_FUSION)
print(json.dumps(found))
"""

pytestmark = pytest.mark.slow
HOPPER_ONLY = {"models_grad_query", "models_grad_key"}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_all_kernels_compile(found):
    assert {entry["kernel"] for entry in found} == {
        "models_attend", "models_add", "models_add_norm", "models_norm_backward", "models_swiglu", "models_swiglu_backward",
        "models_join_parts", "models_rotate", "models_norm_heads", "models_sum_copies", "models_sum_tiles", "models_settle",
        "models_gradients", "models_merge", "models_dequantise_merge", *HOPPER_ONLY,
        "rollout_attend_prefix", "rollout_attend", "rollout_combine", "rollout_write", "rollout_read", "rollout_narrow",
        "rollout_accept", "rollout_settle", "rollout_peaks", "rollout_choose", "rollout_kth",
    }  # fmt: skip
    assert all(entry["cubin"] > 1000 for entry in found)
    assert all(entry["shared"] < 99_000 for entry in found if entry["kernel"] not in HOPPER_ONLY), "or some GPUs could not run it"
    assert all(entry["shared"] < 227_000 for entry in found)


def test_a_new_key_is_written_before_it_is_read(found):
    """By other threads: a barrier separates the stores from the copies at the start of the loop."""
    for entry in found:
        if entry["kernel"] == "rollout_attend" and entry["constants"]["ROTATE"]:
            before = entry["order"][: entry["order"].index("cp.async.cg")]
            last_store = max(i for i, what in enumerate(before) if what == "st.global")
            assert "bar.sync" in before[last_store:], entry


def test_a_row_is_written_after_the_last_barrier(found):
    """Otherwise a warp might read state that another has already advanced."""
    for entry in found:
        if entry["kernel"] == "rollout_settle" and not entry["constants"]["AT_ONCE"]:
            last = len(entry["order"]) - 1 - entry["order"][::-1].index("bar.sync")
            assert "st.global" not in entry["order"][:last], entry


def test_the_cache_is_read_in_copies_of_16_bytes(found):
    for entry in found:
        if entry["kernel"] in ("rollout_attend", "rollout_attend_prefix"):
            assert "0x10" in entry["copies"], entry


def test_weights_are_merged_in_copies_of_16_bytes_by_independent_threads(found):
    """Else each of the ranks takes a barrier, or as many loads as multiplications."""
    merging = [entry for entry in found if entry["kernel"] == "models_merge" and entry["constants"]["ROWS"] == 64]
    assert len(merging) == 6
    for entry in merging:
        assert entry["stored"] == ["v4.b32"], entry
        assert "bar.sync" not in entry["order"], entry
