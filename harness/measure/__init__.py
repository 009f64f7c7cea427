"""The engine that measures. `bench`, `gate` and asv are workloads of it, and commands that show what it found.

    workers.py   `WorkerGroup`: the running workers of one contestant, forked by the zygote (`fork`) or started by a
                 program (`Program`: mpirun, actors). `group.call("measure", order, into=Measurement)` calls a method of
                 the object that each worker serves, in all workers at once; a `Worker` alone has `send` and `answer`.
    worker.py    The worker's side: `serve(address, service, role, rank, detail)`. Public methods of `service` are what
                 can be called; their annotations say how arguments are decoded. `WorkerBarrier` belongs to no library
                 under test. It imports nothing of holdfast, so that the gate's processes can use it with the code of
                 any commit.
    rounds.py    `Workload`: `set_up`, and `turn`, which returns a `Turn`: seconds by figure, and how many results were
                 wrong. `take_turns(workload, contestants, rounds, failed)` lets contestants take turns, round after
                 round, in rotating (`rotated`) or mirrored (`mirrored`: A B B A) order, and drops those that fail.
    stats.py     `Timing`, `Spread`, `pairwise` (ratios of the turns of the same round), Student's t.
    results.py   What every run records, as JSON: `Run` with the `Machine`, the contestants and those left out; `Row`,
                 `Ratio` and `Failure`, which each bench extends with what names its rows. `Noise`: how many CPUs other
                 processes used meanwhile. Tables of figures for the terminal, and the machine in words.

A bench in short:

    class Copying(Workload[WorkerGroup]):
        name = "copy"

        def turn(self, contestant, number):
            answers = contestant.call("copy", number, into=Copied)
            return Turn({"copy": [max(each.seconds for each in answers)]}, wrong=sum(each.wrong for each in answers))

    with ExitStack() as running:
        groups = {name: running.enter_context(WorkerGroup(name, 2, start_of(name))) for name in names}
        turns = take_turns(Copying(), groups, range(5), failed)
"""
