"""Helpers of the tests of allred.doctor."""

from allred.doctor.findings import RankFacts

GiB, MiB = 2**30, 2**20


def rank_facts(*facts, hosts=()):
    """The facts of all ranks, on one host by default."""
    return [RankFacts(rank, hosts[rank] if hosts else "nodeA", fact) for rank, fact in enumerate(facts)]


def verdicts(findings):
    """The verdict of each topic."""
    return {one.topic: one.verdict for one in findings}


def finding_about(findings, topic):
    """The only finding about a topic."""
    (found,) = [one for one in findings if one.topic == topic]
    return found


def write_files(root, files):
    """Create files with the given texts."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
