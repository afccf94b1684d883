"""Energy that a run draws: joules of each node, from whatever the node can tell. Read sources.py, meter.py, account.py.

    auto, in this order                     what is measured      how it is read
    pm_counters   Cray, HPE                 whole nodes           joules, ten times a second afresh
    nvml          NVIDIA's library          GPUs only             joules; watts where a device keeps no count
    hwmon         AMD's kernel driver       GPUs only             watts, once for each package
    rapl          Intel's and AMD's CPUs    CPU packages, memory  joules that begin anew every few minutes

    lowest rank of a node: Source --> Meter --> joules so far --> in the sum that ends each step --> rank 0 --> Account

What is measured differs by a factor of three between these, so it is named wherever a number of kWh is shown. A node
shared with other jobs is measured with them.
"""
