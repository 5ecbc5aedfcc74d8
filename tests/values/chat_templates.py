"""Chat templates in the forms of published models, and the answers that each writes of two conversations."""

from dataclasses import dataclass

_ROLES = "{% for message in messages %}"
_END = "{% endfor %}"
_CHATML = _ROLES + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}" + _END
_ASKS = "{% if add_generation_prompt %}GENERATES{% endif %}"
_CHATML_ASKS = _ASKS.replace("GENERATES", "{{ '<|im_start|>assistant\n' }}")
_THINKING = (
    "{% set ns = namespace(last=messages|length - 1, found=false) %}"
    "{% for message in messages[::-1] %}{% set number = messages|length - 1 - loop.index0 %}"
    "{% if not ns.found and message.role == 'user' and not (message.content.startswith('<tool_response>') "
    "and message.content.endswith('</tool_response>')) %}"
    "{% set ns.found = true %}{% set ns.last = number %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}{% if message.role == 'assistant' %}"
    "{% set reasoning = '' %}{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
_LLAMA_3 = _ROLES + (
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
)
_LLAMA_2 = _ROLES + (
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}"
    + _ROLES
    + (
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    )
)
_R1 = (
    "{{ bos_token }}"
    + _ROLES
    + (
        "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
        "{% if message['role'] == 'assistant' %}{% set content = message['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ '<|Assistant|>' + content + eos_token }}{% endif %}"
    )
)
_TAGGED = _ROLES + "{{ '<|' + message['role'] + '|>\n' + message['content'] + EOS + '\n' }}" + _END
_VICUNA = (
    "{{ 'A chat. ' }}" + _ROLES + "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
)
THOUGHT = "<think>\na\n</think>\n\none."
"""An answer with its reasoning, as the first of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A template, and what it writes of the answers "one." and "two.", and of THOUGHT and "two."."""

    template: str
    plain: tuple[str, str]
    thought: tuple[str, str]
    drops: bool = False
    """Whether THOUGHT loses its reasoning."""
    bos: bool = False
    """Whether the tokenizer begins every text with its first token."""


def _same(template: str, end: str, *, before: str = "", bos: bool = False) -> Form:
    """Return a form that writes every answer whole, with `end` behind it."""
    one, thought, two = (f"{before}{answer}{end}" for answer in ("one.", THOUGHT, "two."))
    return Form(template=template, plain=(one, two), thought=(thought, two), bos=bos)


FORMS = {
    "chatml": _same(_CHATML + _CHATML_ASKS, "<|im_end|>\n"),
    "qwen2.5": _same(
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
        + _CHATML
        + _CHATML_ASKS,
        "<|im_end|>\n",
    ),
    "qwen3": Form(
        template=_THINKING + _CHATML_ASKS,
        plain=("one.<|im_end|>\n", "<think>\n\n</think>\n\ntwo.<|im_end|>\n"),
        thought=("one.<|im_end|>\n", "<think>\n\n</think>\n\ntwo.<|im_end|>\n"),
        drops=True,
    ),
    "qwen3-thinking": Form(
        template=_THINKING + _ASKS.replace("GENERATES", "{{ '<|im_start|>assistant\n<think>\n' }}"),
        plain=("one.<|im_end|>\n", "\n</think>\n\ntwo.<|im_end|>\n"),
        thought=("one.<|im_end|>\n", "\n</think>\n\ntwo.<|im_end|>\n"),
        drops=True,
    ),
    "internlm2": _same("{{ bos_token }}" + _CHATML + _CHATML_ASKS, "<|im_end|>\n", bos=True),
    "yi": _same(_CHATML + _CHATML_ASKS, "<|im_end|>\n", bos=True),
    "llama-2": _same(_LLAMA_2 + _END, " </s>", before=" ", bos=True),
    "llama-3": _same(
        _LLAMA_3 + _END + _ASKS.replace("GENERATES", "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"),
        "<|eot_id|>",
        bos=True,
    ),
    "mistral": _same(
        "{{ bos_token }}" + _ROLES
        + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}" + _END,
        "</s>",
        before=" ",
        bos=True,
    ),
    "zephyr": _same(
        _TAGGED.replace("EOS", "eos_token") + _ASKS.replace("GENERATES", "{{ '<|assistant|>' }}"),
        "</s>\n",
        before="\n",
        bos=True,
    ),
    "phi-3": Form(
        template=_TAGGED.replace("EOS", "'<|end|>'")
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        plain=("one.<|end|>\n", "two.<|end|>\n</s>"),
        thought=(f"{THOUGHT}<|end|>\n", "two.<|end|>\n</s>"),
        bos=True,
    ),
    "phi-4": _same(
        _CHATML.replace("+ '\n' + message", "+ '<|im_sep|>' + message").replace(" + '\n' }}", " }}")
        + _ASKS.replace("GENERATES", "{{ '<|im_start|>assistant<|im_sep|>' }}"),
        "<|im_end|>",
    ),
    "gemma-2": _same(
        _GEMMA + _END + _ASKS.replace("GENERATES", "{{ '<start_of_turn>model\n' }}"), "<end_of_turn>\n", bos=True
    ),
    "deepseek-v2": _same(
        "{{ bos_token }}" + _ROLES + "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
        "{% else %}{{ 'Assistant: ' + message['content'] + eos_token }}{% endif %}" + _END
        + _ASKS.replace("GENERATES", "{{ 'Assistant:' }}"),
        "</s>",
        before=" ",
        bos=True,
    ),
    "r1-distill": Form(
        template=_R1 + _END + _ASKS.replace("GENERATES", "{{ '<|Assistant|><think>\n' }}"),
        plain=("one.</s>", "two.</s>"),
        thought=("\n\none.</s>", "two.</s>"),
        drops=True,
        bos=True,
    ),
    "vicuna": _same(_VICUNA + _END + _ASKS.replace("GENERATES", "{{ 'ASSISTANT:' }}"), "</s>", before=" ", bos=True),
    "command-r": _same(
        "{{ bos_token }}" + _ROLES
        + "{{ '<|START|><|' + message['role'] + '|>' + message['content'].strip() + '<|END|>' }}"
        + _END + _ASKS.replace("GENERATES", "{{ '<|START|><|assistant|>' }}"),
        "<|END|>",
        bos=True,
    ),
    "glm-4": _same(
        "[gMASK]<sop>" + _ROLES + "{{ '<|' + message['role'] + '|>\n' + message['content'] }}" + _END
        + _ASKS.replace("GENERATES", "{{ '<|assistant|>\n' }}"),
        "",
    ),
    "falcon": _same(
        _ROLES + "{% if not loop.first %}{{ '\n' }}{% endif %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] }}"
        + _END + _ASKS.replace("GENERATES", "{{ '\nAssistant:' }}"),
        "",
        before=" ",
    ),
    "granite": _same(
        _ROLES + "{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}"
        "{{ '<|end_of_text|>\n' }}"
        + _END + _ASKS.replace("GENERATES", "{{ '<|start_of_role|>assistant<|end_of_role|>' }}"),
        "<|end_of_text|>\n",
    ),
    "smollm3": Form(
        template=_ROLES + "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
        "{{ '<think>\n\n</think>\n' + message['content'].lstrip('\n') + '<|im_end|>\n' }}{% else %}"
        "{{ message['content'] + '<|im_end|>\n' }}{% endif %}" + _END
        + _ASKS.replace("GENERATES", "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}"),
        plain=("one.<|im_end|>\n", "two.<|im_end|>\n"),
        thought=(f"{THOUGHT}<|im_end|>\n", "two.<|im_end|>\n"),
    ),
    "exaone-deep": Form(
        template=_ROLES + "{% set content = message['content'] %}{% if '</thought>' in content %}"
        "{% set content = content.split('</thought>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '[|' + message['role'] + '|]' + content + ('\n' if message['role'] == 'user' else '[|endofturn|]\n') }}"
        + _END
        + _ASKS.replace("GENERATES", "{{ '[|assistant|]<thought>\n' }}"),
        plain=("one.[|endofturn|]\n", "two.[|endofturn|]\n"),
        thought=(f"{THOUGHT}[|endofturn|]\n", "two.[|endofturn|]\n"),
    ),
}  # fmt: skip
TOKENS = (
    "<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|end|>", "<|START|>", "<|END|>", "[gMASK]", "<sop>", "<|start_of_role|>", "<|end_of_role|>",
    "<|end_of_text|>", "[|user|]", "[|assistant|]", "[|endofturn|]",
)  # fmt: skip
"""Special tokens of all forms."""
