"""The meaning of every metric that a run writes.

The metrics reference of the documentation is made from this table. A test compares the table with
the metrics of real runs. In a name, `<..>` stands for any text without a slash, and `{a,b}` for a
or b. Lengths are in tokens, times in seconds, KL in nats per token.
"""

# Title -> {name: meaning}.
GROUPS: dict[str, dict[str, str]] = {
    'Episodes of the update': {
        'critic/score/{mean,max,min}': 'Total reward of an episode, before any KL penalty.',
        'critic/rewards/{mean,max,min}': (
            'Total reward of an episode after its normalisation (`score_norm`) and the KL penalty '
            '(`kl_in=reward`).'
        ),
        'critic/score_moments/{mean,deviation}': (
            'Mean and deviation of the scores of all updates so far (`score_norm`).'
        ),
        '<name>/mean': (
            'A score of the environment (its `core_metrics`), such as `em/mean`: exact match.'
        ),
        'env/<name>/mean': "Another metric of the environment, from `info['metrics']`.",
        'env/invalid_share': 'Share of turns without a valid action.',
        'env/repeated_share': 'Share of turns that equal an earlier turn of the episode.',
        'env/empty_share': 'Share of turns without a visible character.',
        'env/cut_share': (
            'Share of turns that ended at `rollout.max_turn` or at `rollout.max_total`.'
        ),
        'env/truncated': (
            'Share of episodes that ended at a limit, or whose last turn did, instead of with an '
            'answer.'
        ),
        'program/<name>/mean': (
            'What was counted in the episodes of an agent program, such as rows: '
            '`program/segments/mean`.'
        ),
        'env/retrieval_failed': (
            'Share of episodes in which a search failed. They are not trained on.'
        ),
        'env/environment_failed': (
            "Share of episodes in which the environment's code raised an exception. They are not "
            'trained on.'
        ),
        'env/prompt_too_long': (
            'Share of episodes whose prompt exceeds `rollout.max_prompt`. They are not played.'
        ),
        'outcome/<outcome>': 'Number of episodes with this outcome, see `monitoring/outcomes.py`.',
        'env/replays': 'Number of times that the batch was played again, because searches failed.',
        'rollout/group_size_{max,min}': (
            'Most and fewest episodes of a question, with `rollout.allocation`.'
        ),
        'demonstrations/rows': (
            'Demonstrations that the update trains on. The metrics of episodes leave them out. If '
            'they are rows of the policy gradient (`grao`), the metrics of the update have them.'
        ),
        'demonstrations/score/mean': 'Total reward of a demonstration.',
        'response_length/{mean,max,min}': 'Tokens after the prompt, observations included.',
        'prompt_length/{mean,max,min}': 'Tokens of the prompt.',
        'num_turns/{mean,max,min}': (
            'Messages of an episode: prompt, turns of the agent and observations that it read.'
        ),
        'stppo/agent_tokens/{mean,max,min}': 'Tokens that the agent wrote in an episode.',
        'stppo/agent_turns/{mean,max,min}': 'Turns of the agent in an episode.',
    },
    'Policy': {
        'actor/pg_loss': 'Loss of the policy: minus the clipped objective.',
        'actor/pg_clipfrac': 'Share of tokens whose gradient the clip removed.',
        'actor/pg_clipfrac_lower': (
            'Share of tokens that the dual clip stopped (`algorithm.dual_clip`).'
        ),
        'actor/ppo_kl': 'Mean of old_logp - logp: how far the steps moved the policy.',
        'actor/entropy': 'Entropy of the policy at the tokens of the agent, in nats.',
        'actor/grad_norm': "Norm that the optimizer's gradient clip measured.",
        'actor/lr': 'Learning rate of the actor.',
        'actor/skipped': 'Steps skipped in a row, because a loss or gradient was not finite.',
        'actor/kl_loss': 'KL penalty in the loss, before its coefficient (`kl_in=loss`).',
        'actor/kl_coef': 'Coefficient of the KL penalty in the loss.',
        'actor/reward_kl_penalty': 'KL to the reference, per token (`kl_in=reward`).',
        'actor/reward_kl_penalty_coeff': 'Coefficient of the KL penalty in the reward.',
        'actor/imitation_loss': (
            'Minus the mean log-prob of the agent tokens of demonstrations, before '
            '`algorithm.imitation`.'
        ),
        'actor/teacher_kl': (
            "Mean of old_logp - teacher_logp over the agent's tokens: KL to the teacher, per token."
        ),
        'stppo/ref_kl': 'KL to the reference, per token (`kl_in=loss`).',
        'stppo/pairs': (
            'Groups of an optimizer step whose scores differ, for an objective that compares '
            'episodes. A step without any leaves the policy where it is.'
        ),
    },
    'Clipping bias and step': {
        'stppo/grad_norm': "||g||: norm of the actor's gradient, before division and clip.",
        'stppo/bias_norm': '||C||: norm of the gradient that the clip removed.',
        'stppo/cos_g_c': 'Cosine of the angle between g and C. Absent where nothing is clipped.',
        'stppo/divisor': 'The number that `algorithm.divisor` divides by. 1: no division.',
        'stppo/optimizer_grad_norm': (
            'Norm of the gradient that the optimizer gets, after division and clip.'
        ),
        'stppo/grad_factor': (
            'Norm of the gradient that the optimizer gets, relative to its norm without the '
            'division.'
        ),
        'stppo/applied_factor': (
            'Length of the applied step relative to the step without the division, as a mean over '
            'the steps of the update.'
        ),
        'stppo/applied_factor_{max,min}': 'The largest and the smallest of these factors.',
        'stppo/applied_factor_step<n>': (
            'This factor in optimizer step n of the update, as a mean over the policies.'
        ),
        'stppo/step_scale': 'The factor of `algorithm.step_scale`, which multiplies the step.',
        'stppo/step_norm': 'Norm of the change of the parameters by one optimizer step.',
    },
    'Ratios': {
        'stppo/ratio_std_{token,turn,sequence}': (
            'Standard deviation of the importance ratio over tokens, turns or sequences, whatever '
            'the algorithm uses.'
        ),
        'stppo/clipfrac_turn<n>_{pos,neg}': (
            'Share of clipped tokens in turn n, where the advantage is positive or negative. Turns '
            'after the 16th have none.'
        ),
        'stppo/ess_share': (
            'Effective sample size of the rows as a share of their number, by their weights '
            'from the sampler to the current policy. Near 0: few rows decide. An episode of an '
            'agent program can have several rows.'
        ),
        'stppo/dropped_tokens': 'Share of tokens that filters dropped from the loss.',
    },
    'Critic and advantages': {
        'critic/advantages/{mean,max,min}': 'Advantages, after whitening.',
        'critic/returns/{mean,max,min}': "Targets of the critic's loss.",
        'critic/values/{mean,max,min}': 'Values at the start of the update.',
        'critic/vf_loss': 'Loss of the critic.',
        'critic/outside_bins': (
            "Share of the agent's tokens whose return is beyond the bins of the critic, or within "
            'three bins of their ends (`value_loss=hl_gauss`). It should be 0.'
        ),
        'critic/vf_clipfrac': 'Share of tokens whose value the clip of the critic held back.',
        'critic/vpred_mean': 'Mean value during the steps.',
        'critic/vf_explained_var': (
            'Share of the variance of the returns that the values explain. 1: all. Below 0: worse '
            'than a constant.'
        ),
        'critic/grad_norm': "Norm of the critic's gradient, before its clip.",
        'critic/lr': 'Learning rate of the critic.',
        'critic/step_norm': "Norm of the change of the critic's parameters by one step.",
    },
    'Sampler against trainer': {
        'rollout_corr/kl': "Mean of the sampler's log-prob minus old_logp or the trainer's.",
        'rollout_corr/k3_kl': 'Estimate k3 of the KL from sampler to trainer.',
        'rollout_corr/logp_diff_mean': 'Mean difference of two log-probs, without its sign.',
        'rollout_corr/logp_diff_max': 'Largest difference of two log-probs.',
        'rollout_corr/training_ppl': 'Perplexity of the episodes under the trainer.',
        'rollout_corr/rollout_ppl': 'Perplexity of the episodes under the sampler.',
        'rollout_corr/ppl_ratio': 'Mean ratio of the two perplexities.',
        'rollout_corr/chi2_{token,seq}': 'Chi-square divergence by tokens and by sequences.',
        'rollout_corr/rollout_is_{mean,std,max,min}': (
            'Importance weights from the sampler to old_logp (`algorithm.rollout_is`). Without '
            'weights: those of tokens, not truncated.'
        ),
        'rollout_corr/rollout_is_eff_sample_size': (
            'Effective sample size of these weights, as a share of the tokens.'
        ),
        'rollout_corr/rollout_is_ratio_fraction_{high,low}': (
            'Share of weights above the threshold, and below the lower bound.'
        ),
    },
    'Held-out scores': {
        'val-core/all/<name>': 'Mean of a score over all held-out questions.',
        'val-core/macro/<name>': 'Mean over the data sets, each with the same weight.',
        'val-core/<dataset>/<name>': (
            'Mean of a score over the questions of one data set, or of one environment of a mix.'
        ),
        'val-core/all/<name>_hops<n>': 'The main score of questions that combine n facts.',
        'val-aux/{all,<dataset>}/<name>': 'Another metric of the environment.',
        'val-program/<name>': 'Counts of an agent program, as in program/.',
        'val-aux/{num_turns,agent_turns}/mean': 'Messages and turns of the held-out episodes.',
        'val-aux/{truncated,retrieval_failed,environment_failed,prompt_too_long}': (
            'Share of held-out episodes, as in env/.'
        ),
        'val-outcome/<outcome>': 'Number of held-out episodes with this outcome.',
        'val-role/<role>/<name>': 'A score of one role.',
    },
    'Roles': {
        'role/<role>/{score,agent_turns,agent_tokens}/mean': 'Episodes of one role.',
        'role/<role>/<name>/mean': (
            'A score, or the mean of advantages, returns or values, of one role.'
        ),
        'role/<role>/absent': 'Share of episodes in which the role never moved.',
        'role/<role>/token_share': 'Share of all tokens of agents that this role wrote.',
        'role/<role>/<metric>': 'The metric of the same name, over the rows of one role.',
    },
    'Environments of a mix': {
        'mix/<environment>/{score,agent_turns,agent_tokens}/mean': 'Episodes of one environment.',
        'mix/<environment>/<name>/mean': 'A score of one environment.',
        'mix/<environment>/token_share': 'Share of all tokens of the agent in this environment.',
        'mix/<environment>/absent': 'With roles: share of rows whose role never moved.',
    },
    'Mixture of experts': {
        'moe/load_{max,min,std}': (
            'Load of an expert relative to an even load, over all experts of all layers. 1: even.'
        ),
        'moe/unused_experts': 'Share of experts that no token used.',
        'moe/router_entropy': 'Entropy of the router, in nats.',
        'moe/replaced_experts': 'Share of experts that the replay of routes replaced.',
        'moe/tokens_routed_otherwise': 'Share of tokens with a replaced expert in any layer.',
    },
    'Sampling': {
        'pipeline/staleness': 'Updates between the sampling of the batch and its training.',
        'train/num_gen_batches': 'Rounds of sampling (`rollout.max_num_gen_batches`).',
        'rollout/questions': 'Questions that were played for the batch.',
        'rollout/groups_with_spread': 'Share of played groups whose scores differ.',
        'rollout/groups_kept': 'Share of groups of the batch whose scores differ.',
        'perf/rows_busy': 'Rows that sampled in a decode step, on average. Absent with engines.',
        'perf/decode_steps': 'Decode steps, each of one group of rows. Absent with engines.',
        'perf/prefill_tokens': 'Prompt and observation tokens that were read. Absent with engines.',
        'perf/shared_tokens': 'Prompt tokens that were copied from an equal prompt instead.',
        'engine/turn_age/{mean,max,min}': (
            'Updates between the weights that sampled a turn and the weights that it trains '
            '(`rollout.engine`).'
        ),
        'engine/gap': (
            'Mean difference of the log-probs of engine and trainer with the same weights, at an '
            'evaluation.'
        ),
        'engine/push_s': 'Seconds of pushes of weights to engines, since the batch before.',
    },
    'Time and machine': {
        'timing_s/step': 'Seconds of the update.',
        'timing_s/gen': 'Seconds of sampling. With staleness it overlaps training.',
        'timing_s/gen_{prefill,decode,env}': 'Parts of the time of sampling.',
        'timing_s/wait': 'Seconds of waiting for the batch.',
        'timing_s/compile': (
            'Seconds of waiting for the compiler, in the first update of a run only.'
        ),
        'timing_s/old_log_prob': 'Seconds of log-probs, values and advantages.',
        'timing_s/update_actor': 'Seconds of the optimizer steps of actor and critic.',
        'timing_s/records': 'Seconds of summaries and episode records.',
        'timing_s/testing': 'Seconds of the evaluation.',
        'perf/throughput': 'Tokens of the update per second and device.',
        'perf/padding': 'Share of padding in the packed bins.',
        'perf/shared_train_tokens': (
            'Share of the tokens of training rows that were not computed, because another row of '
            'the bin has the same prefix.'
        ),
        'perf/compilations': 'Programs compiled since the start. It should stop growing.',
        'perf/failed_saves': 'Checkpoints that could not be written.',
        'perf/host_memory_gb': 'Resident memory of the process, in GiB.',
        'perf/max_memory_allocated_gb': 'Largest peak of device memory since the start, in GiB.',
    },
    'Health': {'health/<rule>': '1 if the limit `config.health.<rule>` is exceeded, else 0.'},
}
