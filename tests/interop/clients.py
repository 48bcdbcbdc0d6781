"""Third-party clients against a running gateway: one function a client, exit code 1 if its answer is wrong.

Usage: clients.py NAME BASE_URL MODEL (in the environment that scripts/interop.sh makes).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

QUESTION = "Say hello in three words."


def langchain(base_url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=base_url, model=model, api_key="unused", temperature=0, max_tokens=12)
    whole = llm.invoke(QUESTION)
    streamed = "".join(str(chunk.content) for chunk in llm.stream(QUESTION))
    check(str(whole.content), streamed)
    check(whole.usage_metadata["output_tokens"] > 0, True)


def litellm(base_url: str, model: str) -> None:
    import litellm as client

    common = {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "unused",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = client.completion(**common).choices[0].message.content
    parts = [c.choices[0].delta.content or "" for c in client.completion(stream=True, **common)]
    check(whole, "".join(parts))


def llama_index(base_url: str, model: str) -> None:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=base_url, api_key="unused", is_chat_model=True, temperature=0, max_tokens=12
    )
    whole = llm.complete(QUESTION).text
    streamed = "".join(part.delta or "" for part in llm.stream_complete(QUESTION))
    check(whole, streamed)


def check(got: object, want: object) -> None:
    if got != want or not got:
        raise SystemExit(f"got {got!r}, want {want!r}")


CLIENTS: dict[str, Callable[[str, str], None]] = {
    "langchain": langchain,
    "litellm": litellm,
    "llama_index": llama_index,
}

if __name__ == "__main__":
    name, url, served = sys.argv[1:]
    CLIENTS[name](url, served)
