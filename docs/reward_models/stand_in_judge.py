"""A server that plays a judge, so that the examples of these pages run anywhere, at once, and always say the same.

    python docs/reward_models/stand_in_judge.py          # listens on http://127.0.0.1:8000
    python docs/reward_models/stand_in_judge.py --port 9000 --key secret     # on that port; refuses calls without this key

It reads plaudit's own templates and answers in the form they ask for. An answer that holds the reference is worth 9, 7 if it is
longer than 40 characters, any other 2. It is no model: what it says about a response means nothing beyond that.
"""

import argparse
import itertools
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def section(text: str, title: str) -> str:
    """What stands under a heading of the template."""
    found = re.search(rf"^# {title}\n(.*?)(?=\n\n# |\n\nWrite one line|\Z)", text, re.M | re.S)
    return found[1].strip() if found else ""


def points(response: str, reference: str) -> int:
    if reference.casefold() not in response.casefold():
        return 2
    return 7 if len(response) > 40 else 9


def answer_to(text: str) -> str:
    """What the judge writes."""
    reference = section(text, "Reference") or section(text, "Reference answer")
    response = section(text, "Answer to grade")
    worth = points(response, reference)
    if final := section(text, "Final answer"):
        return str(points(final, reference) > 2)
    if text.startswith("Write a critique"):
        right = points(section(text, "Answer"), reference) > 2
        return "It is right." if right else "It is wrong."
    if "# Answer A" in text:
        first, second = (points(section(text, f"Answer {letter}"), reference) for letter in "AB")
        return "I looked for the reference.\n" + ("tie" if first == second else "A" if first > second else "B")
    if candidates := section(text, "Candidates"):
        shown = re.findall(r"^\[([A-Z])\]\n(.*?)(?=\n\n\[|\Z)", candidates, re.M | re.S)
        scores = {letter: points(said, reference) for letter, said in shown}
        order = sorted(scores, key=lambda letter: -scores[letter])
        signs = ["=" if scores[a] == scores[b] else ">" for a, b in itertools.pairwise(order)]
        ranking = "".join(f"{letter} {sign} " for letter, sign in zip(order, [*signs, ""], strict=True)).strip()
        return f"Ranking:\n{ranking}\nScores:\n" + ", ".join(f"{letter}: {scores[letter]}" for letter in order)
    if criteria := section(text, "Criteria") or section(text, "Criterion"):
        names = re.findall(r"^- ([^:\n]+)", criteria, re.M)
        own = {"correct": worth, "clear": 8 if response.endswith(".") else 4}
        return "Each for itself.\n" + json.dumps({name: own.get(name, worth) for name in names})
    if "# Answer to grade" in text:
        forms = {
            "Total Score": f"Total Score: {worth}/10",
            "<score>": f"<score>{worth}</score>",
            '{"score"': f'{{"score": {worth}}}',
        }
        return "I looked for the reference.\n" + next((form for sign, form in forms.items() if sign in text), str(worth))
    if text.endswith("\nPoints:"):  # of the plugin's page: a point for each word of the response
        return f" {len(text.splitlines()[-2].split())} of 9"
    return "I do not know this template."


class Handler(BaseHTTPRequestHandler):
    key: str | None = None

    def do_GET(self) -> None:
        if self._has_key():
            self._send({"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._has_key():
            return
        chat = "messages" in body
        asked = body["messages"][-1]["content"] if chat else body["prompt"]
        answer = answer_to(asked)
        choice = {"message": {"role": "assistant", "content": answer}} if chat else {"text": answer}
        usage = {"prompt_tokens": len(asked.split()), "completion_tokens": len(answer.split())}  # a token for each word
        self._send({"choices": [{"index": 0, "finish_reason": "stop", **choice}], "usage": usage})

    def _has_key(self) -> bool:
        if self.key is None or self.headers["Authorization"] == f"Bearer {self.key}":
            return True
        self._send({"error": {"message": "wrong or missing key"}}, status=401)
        return False

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def server(port: int = 8000, key: str | None = None) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), type("KeyedHandler", (Handler,), {"key": key}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A server that plays a judge.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--key", help="refuse calls without this key")
    arguments = parser.parse_args()
    listening = server(arguments.port, arguments.key)
    print(f"the stand-in judge listens on http://127.0.0.1:{listening.server_port}", flush=True)
    listening.serve_forever()
