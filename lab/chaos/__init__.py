"""`polyphase bench chaos`: faults under load, one after the other or drawn at random, and a judge of every token.

How it is built
---------------

*Testbeds* (`clusters`) are clusters on free ports of this machine: "emulated" (every service real, the engines
emulated; two gateways and two schedulers), "keyed" (the same, smaller, with CurveZMQ), "real" (vLLM on the CPU,
unlike block sizes), and variants of these. One running suite serves all scenarios of its testbed in turn; when one of
them leaves it unwell, the next gets a fresh one.

*Nothing of the product knows of this.* A plan is what `polyphase up` would run; its processes get three more
environment variables and `inject/` on their PYTHONPATH. By that alone

- every connection between two processes goes by a proxy of its own (`wires`, `proxy`), which can cut, stall, slow,
  corrupt, lose, swap and replay; it knows the framing of ZeroMQ (`zmtp`) and of KV over TCP (`kv_framing`), so that a
  flipped bit arrives in a well-framed message;
- a process's wall clock can jump and its SQLite refuse writes or lose the answers to them, while it runs; a stranger
  can claim another wire version;
- the longest time of CPU that a gateway's event loop is held is measured.

Everything else is done from outside: signals, the monitor's own API, a second connection that locks the database, a
limit on file sizes for a full disk (the kernel refuses the writes: root is not needed), rude clients, garbage on
every port.

*A scenario* (`scenario`, `scenarios/`) is a name, a sentence, a testbed, an async function over an `Arena` (`arena`,
`verbs`) that does the fault, and what it may cost: how long clients miss something that they cannot do without (said,
or measured by the fault with `Arena.away`), whether they may get clean errors, whether it takes a gateway and its
connections away. Its fault is bounded in time; what it left undone is undone; a scenario that hangs or breaks has
failed, and the bench goes on.

*Load* (`load`, `client`) are steady users who ask again as soon as they are answered: chat and completions, streamed
and in one piece, prompts of a few tokens and of many chunks, tokens that can be carried to another engine and tokens
that cannot. Each kind of request has one right answer, asked for before anything is disturbed: an emulated engine's
tokens follow from the position, a real one's from greedy sampling in float32. `judge` compares every answer with it
token by token:

    whole | clean error (typed; says when to come back) | lost | doubled | wrong | cut | hung | crash (500, …)

*A scenario passes* when no token is lost, doubled or wrong and nobody is left hanging; when no wait between two signs
of life is longer than what the scenario takes away, plus one second, plus the longest wait without any fault, plus
what the machine kept the bench itself from running; when no process died that nobody touched; when within 10 s, by
itself, every process and instance is back in its role and users get tokens at the former rate; and when, users gone,
no KV, job, row, memory, open file or process is left behind (`recovery`).

*The random mode* (`monkey`, `draws`) draws overlapping faults from a seed, keeps the load on, and every twelve draws
lets the suite recover and looks at what is left. A draw follows from the seed and its number alone.
"""
