"""The policy loss, the advantages and the correction that follow from verl's settings, with their own options."""

from typing import Any

from gcore_llm.migration.conversion import NEVER, Conversion, as_list, count_of, number_of

ACTOR = "actor_rollout_ref.actor"
ASYNC = "async_training"
_LOSS = f"{ACTOR}.policy_loss"
_CORRECTION = "algorithm.rollout_correction"
BYPASSES = (f"{_CORRECTION}.bypass_mode", f"{ACTOR}.use_rollout_log_probs")
_UNCLIPPED = ("sapo", "gpg", "kl_cov", "dro")
_PARTS = "algorithm.gdpo_reward_keys"
_WEIGHTS = "algorithm.gdpo_reward_weights"


def algorithm(c: Conversion) -> None:
    """Convert the way from scores to advantages."""
    c.copy("algorithm.adv_estimator")
    estimator = c.settings["algorithm.adv_estimator"]
    in_reward = "algorithm.use_kl_in_reward"
    if c.get(in_reward) and estimator in ("gae", "reinforce_plus_plus"):
        c.put(
            "algorithm.kl_ctrl.kl_coef",
            c.get("algorithm.kl_ctrl.kl_coef"),
            "algorithm.kl_ctrl.kl_coef",
            in_reward,
        )
        c.copy("algorithm.kl_penalty")
        c.copy("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl")
    elif c.get(in_reward):
        c.missing[in_reward] = (
            f"not with {estimator}, which has no rewards of single tokens; see kl_loss_coef"
        )
    filters = "algorithm.filter_groups"
    c.put(filters, bool(c.get(f"{filters}.enable")), f"{filters}.enable")
    if c.get(f"{filters}.enable"):
        waves = f"{filters}.max_num_gen_batches"
        c.put("algorithm.max_num_gen_batches", count_of(c, waves) or NEVER, waves)
    bypass = next(filter(c.get, BYPASSES), BYPASSES[0])
    c.put("algorithm.old_log_probs", "rollout" if c.get(bypass) else "trainer", bypass)
    recomputes = f"{ASYNC}.compute_prox_log_prob"
    uses_sampled = f"{ASYNC}.use_rollout_log_probs"
    if c.get(recomputes) or not c.get(uses_sampled):
        c.put("algorithm.old_log_probs", "trainer", recomputes, uses_sampled)
    correction(c)
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    if number_of(c, cap) > 0 and f"{_CORRECTION}.rollout_is" not in c.settings:
        c.put(f"{_CORRECTION}.rollout_is", "token", cap)
        c.put(f"{_CORRECTION}.rollout_is_threshold", number_of(c, cap), cap)


def correction(c: Conversion) -> None:
    """Convert the correction of a batch for the engine's own log-probs."""
    for rule in (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs"):
        if not c.get(rule):
            continue
        if c.settings["algorithm.old_log_probs"] == "rollout":
            c.missing[rule] = (
                "with bypass_mode ratios are to the engine's log-probs, and nothing else corrects"
            )
            continue
        if "," in str(c.get(rule)):
            c.missing[rule] = "one rule of rejection at a time"
            continue
        c.copy(rule)
        threshold = f"{rule}_threshold"
        # Two numbers in one text, 0.5_2.0, are a lower and an upper bound.
        bounds = str(c.get(threshold)).split("_")
        c.put(threshold, float(bounds[-1]), threshold)
        if len(bounds) > 1:
            c.put(f"{threshold}_lower", float(bounds[0]), threshold)
    if f"{_CORRECTION}.rollout_is" in c.settings:
        c.copy(f"{_CORRECTION}.rollout_is_batch_normalize")
    c.copy(f"{_CORRECTION}.rollout_token_veto_threshold")


def policy_loss(c: Conversion) -> None:
    """Convert the policy's loss."""
    mode = f"{_LOSS}.loss_mode"
    c.copy(mode)
    loss = c.settings["actor.loss.loss_mode"]
    if loss not in _UNCLIPPED:
        low = f"{ACTOR}.clip_ratio_low"
        c.put("actor.loss.clip_ratio_low", min(1.0, number_of(c, low)), low)
        c.copy(f"{ACTOR}.clip_ratio_high")
    c.notes[f"{ACTOR}.clip_ratio"] = "verl, too, takes clip_ratio_low and clip_ratio_high"
    if loss in ("vanilla", "dppo_tv", "dppo_kl"):
        c.copy(f"{ACTOR}.clip_ratio_c")
    if loss in ("sapo", "geo_mean"):
        c.put("actor.loss.loss_agg_mode", "seq-mean-token-mean", mode)
    else:
        c.copy(f"{ACTOR}.loss_agg_mode")
    c.copy(f"{ACTOR}.loss_scale_factor")
    bonus = f"{ACTOR}.entropy_coeff"
    if number_of(c, bonus) < 0:
        c.missing[bonus] = "a bonus has a weight of 0 or more"
    else:
        c.put("actor.loss.entropy_coeff", number_of(c, bonus), bonus)
    uses_kl = f"{ACTOR}.use_kl_loss"
    weight = f"{ACTOR}.kl_loss_coef"
    if c.get(uses_kl):
        c.put("actor.loss.kl_loss_coef", c.get(weight), weight, uses_kl)
        c.copy(f"{ACTOR}.kl_loss_type")
    else:
        c.put("actor.loss.kl_loss_coef", 0.0, weight, uses_kl)
        c.notes[weight] = "use_kl_loss is false"
    for section in ("megatron.", "veomni.", ""):
        replay = f"{ACTOR}.{section}router_replay.mode"
        if c.get(replay) not in (None, "disabled"):
            c.copy(replay)


def options(c: Conversion) -> None:
    """Convert the options that the estimator and the loss have of their own, where they are given."""
    table: dict[str, Any] = {}
    sources: list[str] = []
    chosen = {c.settings["algorithm.adv_estimator"], c.settings["actor.loss.loss_mode"]}
    for name, key in c.keys.items():
        if c.has(name) and not chosen.isdisjoint(key.read_by):
            # Of two keys of one option, the latter counts.
            table[name.rpartition(".")[2]] = c.get(name)
            sources.append(name)
    if c.settings["algorithm.adv_estimator"] == "gdpo":
        names = as_list(c.get(_PARTS) or [])
        weights = as_list(c.get(_WEIGHTS) or [1.0] * len(names))
        table["gdpo_rewards"] = dict(zip(names, weights, strict=False))
        sources += [_PARTS, _WEIGHTS]
    if table:
        c.put("algorithm.options", table, *sources)
