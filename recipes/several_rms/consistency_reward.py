"""A plugin: a judge marks whether thoughts, solution and words of a response agree. The row's prompt is not used."""

from response_json import read_marks, read_response

CRITERIA = """Do the parts of this answer agree with each other? Mark each of these with 1 if true, else 0: "the solution follows
from the thoughts", "the words say what the solution says". End with a JSON object of these two marks.
"""
PARTS = {"Thought": "Thoughts", "ResponseSolution": "Solution", "Response": "Words"}


def rm_preprocess(text_prompts, text_responses, tgt_tokenizer):
    inputs = []
    for text in text_responses:
        response = read_response(text)
        shown = text if response is None else "\n".join(f"{title}: {response[key]}" for key, title in PARTS.items())
        inputs.append([{"role": "user", "content": f"{CRITERIA}\n{shown}"}])
    return inputs


def rm_postprocess(results):
    """None: another answer is requested."""
    return [read_marks(result) for result in results]
