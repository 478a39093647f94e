"""How similar the words to the customer are to the reference's, by the BGE service of VeRL-with-rms (verl/utils/bge_sim.py).

The service answers POST {"sent1": …, "sent2": …} with {"sim": cosine}. With s = 0.1 for cosines up to 0.65, 1 from 0.85 on, and
exponential between these two:

    value = 0.3 + 0.7 · s
"""

import json
import os
import urllib.request

from response_json import read_response

URL = os.environ.get("BGE_URL", "http://127.0.0.1:5032/get_bge_sim")
LOW, HIGH = 0.65, 0.85


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    response = read_response(solution_str)
    if response is None:
        return {"score": 0.0, "malformed": True}
    texts = {"sent1": str(response["Response"]), "sent2": str(json.loads(ground_truth)["Response"])}
    request = urllib.request.Request(URL, json.dumps(texts).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=8) as answer:
        cosine = float(json.load(answer)["sim"])
    return {"score": scale(cosine), "cosine": cosine}


def scale(cosine):
    between = min(max((cosine - LOW) / (HIGH - LOW), 0.0), 1.0)
    return 0.3 + 0.7 * 0.1 ** (1.0 - between)
