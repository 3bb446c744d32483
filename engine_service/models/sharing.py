"""How many ranks may share a model, and how many stages it has. It loads nothing."""

from __future__ import annotations

from engine_service.distributed import Group
from engine_service.limits import MOST_RANKS, experts_refused
from engine_service.models.base import EXPERTS, REGISTRY, CausalModel, HFConfig, ModelTraits
from tidemill.runtime.errors import InvalidRequest, Unsupported


def check_fit(
    hf_config: HFConfig,
    traits: ModelTraits,
    group: Group,
    num_stages: int,
    *,
    most_ranks: int = MOST_RANKS,
    num_nodes: int = 1,
) -> None:
    """Whether a model can be split so. Raises InvalidRequest naming what does not divide, and the
    sizes that an engine of so many stages would start with where `num_nodes` hold equally many of
    at most `most_ranks` ranks; and as `check_stages`."""
    kind = REGISTRY.find(hf_config)
    check_stages(kind, traits, num_stages)
    axes = kind.shared_axes(traits, hf_config, whole_experts=group.whole_experts)
    if group.whole_experts:
        _check_experts(axes, traits.architecture, group.size)
    wrong = _uneven(axes, traits.num_kv_heads, group.size)
    if not wrong:
        return
    fitting = [
        str(count)
        for count in range(1 + group.whole_experts, most_ranks // num_stages + 1)
        if count * num_stages % num_nodes == 0 and not _uneven(axes, traits.num_kv_heads, count)
    ]
    advice = f"pass {'one of ' * (len(fitting) > 1)}{', '.join(fitting)}"
    if not fitting:
        given = [f"{num_nodes} nodes"] * (num_nodes > 1)
        given += [f"--pipeline-parallel-size {num_stages}"] * (num_stages > 1)
        given += ["--expert-parallel"] * group.whole_experts
        advice = f"with {' and '.join(given)} no size up to {most_ranks} ranks does: change that"
    raise InvalidRequest(
        f"tensor_parallel_size {group.size} does not divide {traits.architecture}'s "
        f"{' and '.join(wrong)}; {advice}",
        param="tensor_parallel_size",
    )


def _check_experts(axes: dict[str, int], architecture: str, num_ranks: int) -> None:
    if EXPERTS not in axes:
        raise experts_refused(f"{architecture} has none")
    if num_ranks == 1:
        raise experts_refused("tensor_parallel_size is 1")


def check_stages(kind: type[CausalModel], traits: ModelTraits, num_stages: int) -> None:
    """Raises InvalidRequest for more stages than layers, or fewer than one, and Unsupported for a
    model that is not built in stages."""
    if num_stages == 1:
        return
    if not kind.has_stages:
        raise Unsupported(
            f"pipeline_parallel_size {num_stages}: {traits.architecture} is an encoder, which is "
            "not built in stages; pass 1, and one engine per GPU instead",
            param="pipeline_parallel_size",
        )
    if not 1 <= num_stages <= traits.num_layers:
        raise InvalidRequest(
            f"pipeline_parallel_size {num_stages} stages, and {traits.architecture} has "
            f"{traits.num_layers} layers, of which every stage needs one at least; pass "
            f"1 to {traits.num_layers}",
            param="pipeline_parallel_size",
        )


def _uneven(axes: dict[str, int], num_kv_heads: int, num_ranks: int) -> list[str]:
    wrong = [f"{size} {name}" for name, size in axes.items() if size % num_ranks]
    heads = f"{num_kv_heads} key-value heads"
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads and heads not in wrong:
        wrong.append(heads)
    return wrong
