"""A program that serves a judge, in place of vLLM and SGLang. `support.servers.launched` starts it.

Its arguments make it start slowly, have a child, ignore SIGTERM, die after some calls, be silent, or not sleep. Like vLLM it
sleeps at /sleep and /wake_up, and like SGLang at /release_memory_occupation and /resume_memory_occupation, where it may have no
request in flight. With a key, in its environment as for vLLM or in a file as for SGLang, it answers nothing else but /health.
Asleep it answers no call with 200.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

given = sys.argv[1:]
lock = threading.Lock()
calls = in_flight = 0
asleep = False
SLEEP, WAKE = ("/sleep?level=1", "/release_memory_occupation"), ("/wake_up", "/resume_memory_occupation")


def has(name):
    return name in given


def get(name, default):
    return given[given.index(name) + 1] if has(name) else default


def first(name):
    """Whether this argument's file does not exist yet: something that happens once, however often the program is started."""
    path = get(name, "")
    if not path or Path(path).exists():
        return False
    Path(path).touch()
    return True


def note(file, **what):
    with open(get(file, os.devnull), "a") as opened:
        opened.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def give(self, answer, status=200):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        key = os.environ.get("PLAUDIT_SERVER_TOKEN")
        if has("--config"):
            key = json.loads(Path(get("--config", "")).read_text().removeprefix("api-key: "))
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def do_GET(self):
        if self.path == "/health" or self.allowed():
            self.give({"data": [{"id": "judge"}]})
        else:
            self.give({"error": "no key"}, 401)

    def do_POST(self):
        global calls, in_flight
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            self.give({"error": "no key"}, 401)
        elif self.path in SLEEP + WAKE:
            self.switch()
        elif self.path in ("/abort_request", "/flush_cache"):
            note("--events", path=self.path)
            busy = self.path == "/flush_cache" and first("--busy")
            self.give({"message": "there are running requests"} if busy else {}, 400 if busy else 200)
        else:
            with lock:
                calls += 1
                in_flight += 1
                number = calls
            try:
                self.judge(body, number)
            finally:
                with lock:
                    in_flight -= 1

    def switch(self):
        global asleep
        note("--events", path=self.path, in_flight=in_flight)
        time.sleep(float(get("--switch-takes", 0)))
        if self.path in SLEEP and (first("--never-sleeps") or in_flight):
            self.give({"error": "busy"}, 500)
        elif self.path in WAKE and first("--never-wakes"):
            self.give({"error": "CUDA out of memory"}, 500)
        else:
            asleep = self.path in SLEEP
            self.give({"status": "asleep" if asleep else "awake"})
            if asleep and first("--dies-asleep"):
                os._exit(9)

    def judge(self, body, number):
        note("--events", path=self.path, asleep=asleep)
        if asleep:
            return self.give({"error": "it is asleep"}, 500)
        if number > int(get("--dies-after", 10**9)):
            print("out of memory", flush=True)
            os._exit(7)
        short = body.get("max_tokens") == 1
        if silent or (has("--slow") and not short):
            time.sleep(1000)
        time.sleep(float(get("--answer-takes", 0)))
        if self.path == "/v1/embeddings":
            return self.give({"data": [{"embedding": [body["input"].count(letter) for letter in "abc"]}]})
        if self.path == "/v1/completions":
            return self.give({"choices": [{"text": f"{os.getpid()} {body['prompt']}"}]})
        return self.give({"choices": [{"message": {"content": f"{os.getpid()} " + body["messages"][-1]["content"]}}]})


if __name__ == "__main__":
    silent = first("--silent")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) if has("--child") else None
    note("--starts", child=child and child.pid, arguments=given, dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE"))
    if has("--stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("loading the weights", flush=True)
    time.sleep(float(get("--takes", 0)))
    if has("--no-gpu") and has("--enable-sleep-mode"):
        sys.exit("  Value error, Sleep mode is not supported on current platform.\n    For further information visit …")
    if has("--broken"):
        sys.exit("ValueError: " + get("--says", "no such model"))
    http.server.ThreadingHTTPServer(("127.0.0.1", int(get("--port", 0))), Handler).serve_forever()
