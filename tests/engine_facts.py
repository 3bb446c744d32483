"""What a small engine says of itself, for tests of a frontend's rules."""

from frontend.messages import EngineFacts

FACTS = EngineFacts(
    instance_id="i",
    model_id="m",
    max_model_len=32,
    vocab_size=300,
    max_logprobs=5,
    tokenizer_sha256="",
    default_method="block_diffusion",
    methods=("autoregressive", "block_diffusion"),
    block_length=16,
    mask_token_id=299,
    eos_token_ids=(7,),
)
