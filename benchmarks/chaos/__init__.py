"""The fault suite: `polyphase bench chaos` and `bench troubles`. Faults under load, and a judge of every token.

*No code of the product takes part.* A suite (`under_test`) runs the plan of `polyphase up` on the cluster of a testbed
(`testbeds`), with more environment variables and `inject/` on the PYTHONPATH of its processes. Through these

- each connection between two processes passes a proxy of its own (`wires`, `proxy`), which can cut, stall, slow,
  spoil and replay messages;
- the wall clock of a process can jump, and its SQLite can refuse writes or lose the answers to them, while it runs; an
  instance or gateway can claim another wire version;
- the longest CPU time for which a gateway's event loop is held is measured.

Other faults come from outside: signals, the monitor's API, a second connection that locks the database, a limit on file
sizes for a full disk (the kernel refuses the writes), hostile clients (`hostile`), and garbage on all ports
(`garbage`). `faults` is the library of faults that scenarios and the random mode (`random_mode`) share.

The *load* (`load`) are steady users: chat and completions, streamed and in one piece, prompts of a few tokens and of
many chunks, tokens that can be carried to another engine and tokens that cannot. Each kind of request has one right
answer, which is obtained before the first fault: tokens of an emulated engine follow from the position, those of a real
engine from greedy sampling in float32. Each answer is compared with it token by token:

    whole | clean error (typed, with Retry-After) | lost | doubled | wrong | cut | hung | crash (500, …)

A *scenario* (`scenario`, `scenarios/`) is a fault and its highest cost to clients. It passes when no token is lost,
doubled or wrong and no client hangs; when no wait between two signs of life is longer than the scenario's outage, plus
one second, plus the longest wait without a fault, plus the time for which the machine kept the bench from running; when
only targets of the fault ended; when within 10 s, without help, all processes and instances are back in their roles and
users get tokens at the former rate; and when without users no KV, job, row, memory, open file or process is left
behind (`recovery`). A scenario of `bench troubles` holds its fault until the monitor's verdict names the expected
problem, and compares the fields of the verdict (`verdict`). One suite serves all scenarios of its testbed while it is
healthy (`run`).
"""
