"""Chat templates: prompts of the engine and their tokens, against transformers'."""

from __future__ import annotations

import random
from typing import Any

from transformers import PreTrainedTokenizerFast

from benchmarks.adversarial_text import adversarial_texts
from benchmarks.agreement_parts.compared_model import ComparedModel
from benchmarks.agreement_parts.tokens import NO_TOKENIZER, published_tokenizer
from benchmarks.gguf_model import llama_cpp_tokenizer
from localgen.backends.text.template import ChatTemplate
from localgen.backends.types import Message


def conversations(count: int) -> list[list[Message]]:
    """Random conversations of adversarial texts, some with special tokens in the content."""
    chance, texts = random.Random(count), adversarial_texts(count)
    found = []
    for _ in range(count):
        roles = ["system"] * chance.randint(0, 1) + ["user", "assistant"] * chance.randint(0, 3)
        found.append([Message(role, chance.choice(texts)) for role in [*roles, "user"]])
    return found


def templates(model: ComparedModel, count: int) -> None:
    """Compare prompts and their tokens, if the tokenizer of the model's authors is known."""
    source, published = model.source.chat_template, published_tokenizer(model.path)
    if source is None or published is None:
        missing = "chat template in the file" if source is None else NO_TOKENIZER
        model.report.not_compared.append(f"prompts with transformers': no {missing}")
        return
    own = model.source.load_tokenizer()
    template = ChatTemplate(source, bos=own.bos, eos=own.eos)
    # its constructor has no types
    made: Any = PreTrainedTokenizerFast
    reference = made(
        tokenizer_object=published, bos_token=own.bos, eos_token=own.eos, chat_template=source
    )
    texts = ids = 0
    with llama_cpp_tokenizer(model.path) as theirs:
        for messages in conversations(count):
            turns = [{"role": m.role, "content": m.content} for m in messages]
            prompt = template.render(messages)
            wanted = reference.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
            encoded = reference(prompt, add_special_tokens=False)["input_ids"]
            texts += prompt != wanted
            ids += not own.encode(prompt) == theirs.encode(prompt) == encoded
    model.none_of("chat template", "prompts differ from transformers'", texts, count)
    model.none_of("chat template", "tokens of prompts differ", ids, count)
