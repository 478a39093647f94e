"""A plugin: a judge marks the words to the customer by the criteria in the row's own prompt, which has `{response}` in it."""

from response_json import read_marks, read_response

CRITERIA = """Below is what an agent said to a courier who cannot reach a customer. Mark each of these with 1 if it is true, else 0:
"polite", "clear", "helpful". End with a JSON object such as {"polite": 1, "clear": 0, "helpful": 1}.

{response}
"""


def rm_preprocess(text_prompts, text_responses, tgt_tokenizer):
    inputs = []
    for prompt, text in zip(text_prompts, text_responses, strict=True):
        response = read_response(text)
        said = text if response is None else str(response["Response"])
        question = prompt if "{response}" in prompt else CRITERIA
        inputs.append([{"role": "user", "content": question.replace("{response}", said)}])
    return inputs


def rm_postprocess(results):
    """None: another answer is requested."""
    return [read_marks(result) for result in results]
