"""Imported by the vLLM servers of tests before anything else: they fork their engine. On a CPU, vLLM would start it in a new
interpreter, which imports everything again and takes half of the time until a server answers. Garbage is rarely searched for: five
thousand modules are imported, and none of them is garbage."""

import gc
import multiprocessing
import sys

if "vllm.entrypoints.openai.api_server" in sys.orig_argv:
    gc.set_threshold(100_000, 50, 1000)
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)  # pyright: ignore
