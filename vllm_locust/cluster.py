"""What master and workers tell each other.

Everything that travels is bytes of our own encoding, or plain values, inside Locust's custom messages. A local run goes
the same way, since Locust calls the listeners in place.

hello: a worker can listen. start: take part in a run, or take the rank of a worker that is lost. state: what
cannot wait for the next report, that all users have finished a request, or that nothing is left to send. steady: the
warm-up ends at an instant. report: the whole state of what has changed, which ack
confirms. reset: a new epoch begins. finish: close the gate, let streams run out or cut them, say the last. refused:
another version. log: what a worker has kept (the log of requests, or samples of answers) is wanted from an offset on,
once the last is said; rows is a piece of it.
"""

HELLO, START, STATE, STEADY, RESET, REPORT, ACK, FINISH, REFUSED, LOG, ROWS = (
    f"vllm_locust:{name}"
    for name in (*("hello", "start", "state", "steady", "reset", "report", "ack", "finish", "refused", "log", "rows"),)
)
REQUESTS, SAMPLES = "requests", "samples"
"""What a worker keeps until the run is over."""
TICK_S = 1.0
"""How often a worker harvests and reports, and a master looks; so much do live figures lag."""
POLL_S = 0.02
"""How often what is waited for is looked at."""
