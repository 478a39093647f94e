"""Imported by the vLLM servers of tests before anything else: they fork their engine. On a CPU, vLLM would start it in a new
interpreter, which imports everything again and takes half of the time until a server answers."""

import multiprocessing
import sys

if "vllm.entrypoints.openai.api_server" in sys.orig_argv:
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)  # pyright: ignore
