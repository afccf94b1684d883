"""Words of the hints of lab 8, by the keys that laws raise and mistakes.py names. Pure."""

from __future__ import annotations

HINTS = {
    # of sizes
    "one_table": "A table of vocabulary x hidden is missing: the output layer has one of its own here.",
    "no_norms": "The norms are missing: hidden parameters each, two a layer, and one behind the last layer.",
    "attention_matrices": "Attention has four matrices of hidden x hidden: query, key, value and output.",
    "gate": "The feed-forward network has three matrices with a gate, and two without; with a gate there are four "
    "tensors of ffn channels to keep, and two without.",
    # of FLOPs
    "backward": "The backward pass is missing, or too short: it makes the gradient of the input and that of the "
    "weights, a product each, so that a step is three forward passes.",
    "per_weight": "A product is a multiplication and an addition for each weight: 2 FLOPs, not one.",
    "scores": "Attention also multiplies queries with keys and scores with values: 2 products, 4 x hidden x sequence "
    "FLOPs for each token and layer in a forward pass; here the whole square of scores counts.",
    "lookup": "Looking a token up in the embedding is no product, and norms are none: of the tables only the output "
    "layer's is multiplied with.",
    "no_head": "The output layer is a product, too: hidden x vocabulary.",
    # of memory
    "tables_whole": "The tables are split over tp as well, by rows of the vocabulary.",
    "norms_split": "Norms are not split: each device of tp has them whole.",
    "stage": "A device has the layers of its own stage alone: layers / pp.",
    "head_stage": "The output layer and the norm before it are on the last stage; the first one has them only if it is "
    "the last, too.",
    "states_by_tp": "Optimizer states belong to the parameters that the device has, so tp and pp divide them as well.",
    "shard": "States are spread over dp if the layout says so, and only then; parameters and gradients are not.",
    "bytes_each": "Count again: weights and gradients take 2 bytes each in 16 bit; a moment, another, and the master "
    "weight in float32 are 12.",
    "held": "How many microbatches does the first stage hold in 1F1B before its first backward pass? pp, or as many as "
    "there are, if they are fewer.",
    "batch_for_micro": "Activations are those of a microbatch, not of the whole batch.",
    "samples": "A microbatch has micro_batch samples.",
    "keeps_all": "With recomputation only the input of each layer is kept.",
    "layer_at_work": "One layer at a time is recomputed, and is there whole while its backward pass runs.",
    "streams": "Over tp only tensors inside attention and feed-forward network are split; inputs of norms and what "
    "norms make are whole on every device.",
    "bytes_kept": "An activation takes 2 bytes.",
    "kinds": "memory_bytes returns a dict with the bytes of parameters, gradients, states and activations.",
    # of what gets worse
    "slower": "Something faster makes the step slower: is a rate multiplied where it should divide?",
    "more_memory": "More sharding takes more memory: what does a device hold less of?",
    # of time
    "again": "With recomputation there is a fourth pass: the forward pass is done twice.",
    "efficiency": "Training sustains the peak times the efficiency.",
    "work_by": "The work of the whole batch is shared by all devices, dp x tp x pp of them.",
    "micro_for_batch": "A step has the samples of the whole batch, not of a microbatch.",
    "bubble": "(p - 1) / m of the time at work is added; it is (p - 1) / (m + p - 1) of the whole. Mind which of the "
    "two you have.",
    "no_bubble": "With stages devices idle: the bubble is missing.",
    "bubble_batch": "m is the number of microbatches of one replica: batch / (dp x micro_batch).",
    "bubble_waits": "A stage that sums over tp keeps the next one waiting as well: the bubble is a share of work and "
    "sums together.",
    "tp_once": "Count the sums over tp of a layer: behind attention and behind the feed-forward network, in the "
    "forward pass and in the backward pass.",
    "tp_again": "A recomputed forward pass sums over tp once more.",
    "tp_microbatches": "Each microbatch is summed over tp, so the sums of a step are those of all of them.",
    "tp_layers": "A device sums for the layers of its own stage alone.",
    "ring": "A ring sends 2 (p - 1) / p of what it sums from each device.",
    "latency": "A ring sends 2 (p - 1) messages one after another; each of them waits for the latency.",
    "bits": "Links between nodes are given in bits a second, those inside a node in bytes a second.",
    "links": "Which ranks meet? tp are neighbours; replicas are tp ranks apart, so a ring over dp stays in a node only "
    "if dp x tp ranks do.",
    "gradient_part": "A device sums gradients of the parameters that it has itself, not of the whole model.",
    "gradient_bytes": "Gradients travel in 16 bit: 2 bytes each.",
    # of efficiency
    "share_of_peak": "This is the share of the peak that the whole step reaches. Bubble and sums are not the devices' "
    "fault: which efficiency makes step_seconds come to what was measured?",
    "upside_down": "An efficiency is a share of the peak; this is 1 over it.",
    "efficiency_off": "Put your result into step_seconds: the measured seconds have to come back. They are a / "
    "efficiency + b.",
    # of the search
    "none_found": "There is a layout that fits, but None was returned.",
    "no_layout": "best_layout returns a Layout, or None if no layout fits.",
    "devices": "dp x tp x pp has to be the number of devices.",
    "divides": "tp has to divide heads, ffn and vocabulary, pp the layers, and dp x micro_batch the batch.",
    "too_large": "The layout does not fit into the memory of a device: sum up all kinds of bytes.",
    "not_tried": "It is the best of those that are like it in one number, and another value of that is better: do you "
    "try all values?",
    "not_best": "Another layout that fits is faster by your own step_seconds.",
    # of races
    "far_off": "The laws hold, but the times are off. Which of your numbers does a layout that is off depend on?",
}  # fmt: skip
