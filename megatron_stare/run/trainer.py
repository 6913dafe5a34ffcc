"""The loop: sample, score, learn, publish. What each line does lives in the part that it calls."""

from __future__ import annotations

from megatron_stare.run.session import Session


def train(session: Session) -> None:
    """Reinforcement learning. Every rank runs this; rank 0 alone samples, scores, publishes and reports."""
    session.publish()
    for step in session.remaining_steps():
        groups = session.sample(step)  # responses and rewards, until the batch is full
        batch = session.distribute_groups(groups)  # advantages; each replica its packed share
        signals = session.measure(batch)  # log-probs and entropy before the step
        decision = session.decide(signals)  # STARE's gate: how strongly to reweight, this step
        stats = session.learn(batch, signals, decision)  # one or more optimizer updates
        session.publish()  # the servers serve what was learned
        session.finish_step(step, groups, signals, decision, stats)  # log, evaluate, save


def train_supervised(session: Session) -> None:
    """Supervised training on a task's responses with the same engine: a start for RL."""
    for step in session.remaining_steps():
        batch = session.distribute_rows(session.next_rows())
        stats = session.learn_supervised(batch)
        session.finish_supervised_step(step, batch, stats)
