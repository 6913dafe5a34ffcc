"""Tasks: prompts in, rewards out. Light to import: reward workers load this package too."""

from megatron_stare.tasks.cursor import PromptCursor
from megatron_stare.tasks.data import OverlongPrompt, PromptSource, open_source
from megatron_stare.tasks.reward import RewardStats, Scorer, check_reward
from megatron_stare.tasks.sample import Group, Prompt, Response
from megatron_stare.tasks.tokenizer import decode_response, encode_response, fill_texts, load_tokenizer

__all__ = [
    "Group",
    "OverlongPrompt",
    "Prompt",
    "PromptCursor",
    "PromptSource",
    "Response",
    "RewardStats",
    "Scorer",
    "check_reward",
    "decode_response",
    "encode_response",
    "fill_texts",
    "load_tokenizer",
    "open_source",
]
