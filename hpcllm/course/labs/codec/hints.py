"""Hints of lab 3: the likely mistake, and what to look at."""

from __future__ import annotations

FORM_HINTS = {
    "form": "The function returns something else than its docstring says: look at its type, its dtype, and its length.",
    "length": "The encoding has another length: n codes of one byte, and four bytes for each block of 256 values.",
    "padded": "The zeros that fill up the last block are sent, too. Cut the codes to n.",
    "tail": "The last block is shorter than the others and has a scale all the same: how many blocks do n values have?",
    "empty_block": "There is a block too many where 256 divides n: n // 256 + 1 is not n / 256 rounded up.",
    "layout": "First come the scales of all blocks, then all codes.",
    "overwritten": "What the function was given has changed, and belongs to the caller. Work on a copy.",
    "shared": "The function returns the same memory each time. One encoding may still be on its way when the next is "
    "made.",
}
SCALE_HINTS = {
    "scale": "A scale is not the largest magnitude of its block over 127.",
    "one_scale": "All blocks have the scale of the largest one. Each has its own: one large value must not cost the "
    "others their digits.",
    "signed_max": "The scale is that of the largest value; the most negative one may be larger in magnitude.",
    "steps": "The scale is that of 128 steps. Codes end at 127 on both sides, so 127 steps have to reach the largest.",
    "steps_255": "The scale is that of 255 steps. There are 127 on each side of zero.",
    "range": "The scale is made from the distance of least and largest value. Codes are symmetric: zero stays zero.",
    "mean": "The scale is made from the mean magnitude: then the largest values do not fit. Take the largest.",
    "inverse": "This is 1 / scale. What is sent is the number that codes are multiplied by.",
    "peak": "This is the largest magnitude itself; the scale is a 127th of it.",
    "wrong_block": "Values meet the scale of another block. Each scale belongs to 256 values that follow one another "
    "(np.repeat, or rows of 256), not to every so many-th.",
    "next_block": "Each block has the scale of the one behind it: where does a block begin?",
    "least_scale": "A block of zeros, or of numbers near the least, has a scale of 0 or next to it, and dividing by it "
    "gives no numbers. The scale is never below LEAST_SCALE.",
    "spread": "A value that is not finite has changed other blocks than its own. Is its largest taken over all blocks?",
    "hidden": "A block with a value that is not finite has to have the scale NaN and codes 0. Else a run that has "
    "broken down goes on as if nothing had been. NaN compares False with everything: test with np.isfinite.",
}
CODE_HINTS = {
    "codes": "A code is further from value / scale than half a step.",
    "toward_zero": "Codes are rounded toward zero, as astype does: errors reach a whole scale, and all shrink. "
    "np.rint rounds to the nearest.",
    "floor": "Codes are rounded down: errors reach a whole scale, and their mean is half of one, not zero.",
    "ceil": "Codes are rounded up: errors reach a whole scale, and their mean is half of one, not zero.",
    "unsymmetric": "Halves are rounded in one direction: floor(x + 0.5) takes -0.5 to 0 and 0.5 to 1. Over many values "
    "that is a bias. np.rint takes them to the even neighbour.",
    "minus_128": "Here is the code -128, and there is no +128: codes are -127 to 127.",
    "overflow": "A quotient beyond 127 was cast to int8 and came out at the other end. What is the largest quotient?",
    "unsigned": "Codes are signed: the byte 255 is -1. View the bytes as np.int8.",
    "offset": "Codes are two's complement, without an offset of 128.",
    "decoding": "A decoded value is not its code times the scale of its block.",
}
FEEDBACK_HINTS = {
    "not_added": "The residual of the step before is not in what is sent: encode values + residual.",
    "sign": "The residual has the wrong sign: it is what was wanted less what was sent, and is added the next time.",
    "doubled": "The residual counts twice: values + residual has the old one in it already, so that the new one "
    "replaces it.",
    "not_kept": "The residual is as it was. Write into the array that was given (residual[:] = ...); residual = ... "
    "only gives another array that name.",
    "only_last": "The residual is values less what was sent; what was to be sent is values + residual.",
    "units": "The residual is in steps of the scale, which is another one the next time. Keep it in units of values.",
    "kept_sent": "The residual is what was sent; what was left out is wanted.",
    "kept_all": "The residual is all that was to be sent. Take off what the bytes decode to.",
    "poisoned": "The residual holds a value that is not finite, and would break that block in all steps to come. Set "
    "it to 0 there.",
    "lost": "Each step looks right, but over many the sum of what was sent is not that of what was to be sent.",
    "feedback": "The residual is not what the encoding of values + residual left out.",
}
OTHER_HINTS = {
    "never": "On this link no length pays: a value costs more time in the codec than it saves. The answer is math.inf.",
    "no_scales": "The scales travel, too: 4 bytes for each block of 256 values.",
    "all_bytes": "An encoded value still takes a bit more than one of the four bytes.",
    "in_bytes": "This is a number of bytes, or the codec's time is; values are asked for, of 4 bytes each.",
    "values_a_second": "codec_bytes_per_s counts bytes of float32: a value has four.",
    "twice": "Both calls, of encode and decode, are in call_s and codec_bytes_per_s already.",
    "nothing": "x is as it was: the sum has to be written into x itself (x[:] = ..., x += ...).",
    "mean": "This is the mean; the sum is wanted.",
    "incomplete": "Somebody's addend is missing in some parts. Does the owner add its own?",
    "twice_added": "Somebody's addend is there twice.",
    "bits": "Ranks have different bits. The owner, too, has to take what the encoding of its sum decodes to: it "
    "encodes once, and all decode the same bytes. Replicas whose weights differ in a bit drift apart.",
    "traffic": "A rank sends more than its parts take, encoded. Is something sent as float32, or sent to all that is "
    "for one?",
    "losses": "The laws above hold, but the losses of a training run are others. Does a function keep something from "
    "an earlier call?",
    "slow_link": "On a slow link your sum takes long beside ours. Is something sent that need not be, and is encode "
    "free of loops over blocks or values?",
    "slow": "Right, but slow beside ours. A loop in Python over blocks, or over values, takes longer than a slow link: "
    "let NumPy work on all blocks at once.",
    "forbidden": "Use sends and receives.",
}
HINTS = FORM_HINTS | SCALE_HINTS | CODE_HINTS | FEEDBACK_HINTS | OTHER_HINTS
