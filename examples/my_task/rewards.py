"""A reward function of one's own; it needs nothing of this package."""


def score(turns, record):
    """Gives 1 for the right sum, .3 for its first digit in an answer of its length, else 0."""
    response = turns[-1]
    if not response["finished"]:
        return 0.0
    right = str(record["sum"])
    answer = response["content"]
    if answer == right:
        return 1.0
    return 0.3 if len(answer) == len(right) and answer[0] == right[0] else 0.0
