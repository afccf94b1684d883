"""Chat templates: messages -> one text. Ours as Jinja, or a tokenizer's own; chat_rendering.py renders by them.

    chatml     <|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n[...<|im_end|>]\\n
    llama3     <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\n...<|eot_id|>...
    mistral    <s>[INST]...[/INST][...</s>]                       [ ]: what {% generation %} marks
    plain      user\\n...<|end_of_text|>assistant\\n[...<|end_of_text|>]     with no token but the end of text
    tokenizer  chat_template of a Hugging Face folder, as transformers renders it

Here are their texts alone, which training compares: it never renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcllm.config.input_files import read_text
from hpcllm.errors import DataError

Message = Mapping[str, str]  # role, content
BEGIN, END, SEAM = "\ufdd0", "\ufdd1", "\ufdd2"  # noncharacters of Unicode: no text has them
OWN, PLAIN = "tokenizer", "plain"
LARGEST_TEMPLATE_CHARACTERS = 2**18


@dataclass(frozen=True)
class TemplateSource:
    """Text of a template, the control tokens that it needs, and its variables beside the messages."""

    text: str
    controls: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None
    is_ours: bool = True

    @property
    def has_marks(self) -> bool:
        """True if the template itself marks what an assistant has written."""
        return bool(MARKS.search(self.text))


TEMPLATES = {
    "chatml": TemplateSource(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": TemplateSource(
        "<|begin_of_text|>{% for message in messages %}"
        "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
        "<|start_header_id|>{{ role }}<|end_header_id|>{{ '\\n\\n' }}"
        "{% if role == 'assistant' %}{% generation %}{{ message.content | trim }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": TemplateSource(
        "<s>{% set before = namespace(system='', role='assistant') %}{% for message in messages %}"
        "{% if message.role == 'system' and loop.first %}{% set before.system = message.content + '\\n\\n' %}"
        "{% elif message.role not in ('user', 'assistant') or message.role == before.role %}"
        "{{ raise_exception('roles go user, assistant, user, ..., after at most one system') }}"
        "{% elif message.role == 'user' %}[INST]{{ before.system + message.content }}[/INST]"
        "{% set before.system = '' %}{% set before.role = 'user' %}"
        "{% else %}{% generation %}{{ message.content }}</s>{% endgeneration %}{% set before.role = 'assistant' %}"
        "{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
    ),
    # a role is one only behind an end of text, so no message forges it; for the tokenizer of any base model
    PLAIN: TemplateSource(
        "{% for message in messages %}{{ message.role + '\\n' }}"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
        "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}",
        variables={"eos_token": "<|end_of_text|>"},  # that of a tokenizer trained here; a given one has its own
    ),
}
NAMES = (*TEMPLATES, OWN)
NO_TEMPLATE = TemplateSource("")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RejectedError(Exception):
    """A conversation that cannot become a document; a reason to count, and words for this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


INSTEAD = f"valid: another tokenizer, or --template {', '.join(TEMPLATES)}"


def own_template(tokenizer: Path | None) -> TemplateSource:
    """Read the chat template that lies beside a tokenizer. Raises DataError.

    tokenizer: a Hugging Face folder or its tokenizer.json. A template in a file of its own comes before the key
    chat_template of tokenizer_config.json; of several templates, "default" is taken.
    """
    if tokenizer is None:
        raise DataError("--template tokenizer needs --tokenizer: a Hugging Face folder whose tokenizer has a template")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    facts, plain = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        known = json.loads(read_text(facts)) if facts.exists() else {}
        found = read_text(plain) if plain.exists() else known.get("chat_template")
    except (ValueError, RecursionError, AttributeError) as error:
        why = str(error)[:200]
        raise DataError(f"the chat template in {str(folder)!r} cannot be read: {why}; {INSTEAD}") from error
    if isinstance(found, list):
        named = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str) or not 0 < len(found) <= LARGEST_TEMPLATE_CHARACTERS:
        raise DataError(
            f"{str(folder)!r} has no chat template of up to {LARGEST_TEMPLATE_CHARACTERS:,} characters, neither in "
            f"chat_template.jinja nor in tokenizer_config.json; {INSTEAD}"
        )
    variables = {key: _token(known.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return TemplateSource(found, variables={key: text for key, text in variables.items() if text}, is_ours=False)


def _token(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
