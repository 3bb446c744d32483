"""RoBERTa and XLM-RoBERTa (BGE-M3, multilingual E5, BGE's rerankers): BERT whose positions are
counted from behind the padding's, with a head of two layers (Liu et al. 2019, arXiv 1907.11692).
"""

from __future__ import annotations

from engine_service.models.base import HFConfig, register_model
from engine_service.models.bert import Bert, BertClassifier

_PADDING = 1
"""The id of the padding token where config.json does not say."""


class _Differences:
    max_segments = 1
    """Its tokenizers tell no texts apart, whatever the checkpoint has vectors for."""

    @classmethod
    def first_position(cls, hf_config: HFConfig) -> int:
        """See Bert."""
        padding = hf_config.get("pad_token_id")
        return 1 + (_PADDING if padding is None else int(padding))


@register_model("RobertaModel", "XLMRobertaModel")
class Roberta(_Differences, Bert):
    """The pooler of the checkpoint takes no part in embeddings."""


@register_model("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification")
class RobertaClassifier(_Differences, BertClassifier):
    """A head over the first position: a cross-encoder, where it has a single label."""

    prefix = "roberta."
    pooler_prefix, head_name = "classifier", "classifier.out_proj"
