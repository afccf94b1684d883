"""The likely mistakes of lab 7: key -> what to look at."""

from hpcllm.course.ranges import HINTS as RANGES

HINTS = RANGES | {
    "two_numbers": "place returns two whole numbers: where this rank's part begins, and the length of the whole array.",
    "offset": "Parts need not have equal lengths: where a rank's part begins is the sum of the lengths of the ranks "
    "before it (exscan), not rank times length.",
    "order": "It works if no rank is late, and not in this order. Which rank uses something (a file, a name) that "
    "another one has to make or to finish first? There they have to meet.",
    "names": "load has to return the step and all the arrays that were saved, under their names, in their order: "
    "weights without the optimizer's state do not go on as they were.",
    "step": "The step has to come back, too: by it the next batch and the learning rate are found.",
    "cut": "An array has another length or type than was saved. Where does the file say how long the whole is, and is "
    "the part that is read cut by own_range?",
    "misplaced": "Values are not where they belong: compare the offset at which a part is written (after all arrays "
    "before it, whole) with the one at which it is read. Bytes or values? Bits that are no number count, too.",
    "not_found": "Nothing went wrong, and the checkpoint is not found, or not taken for whole: do its checksums belong "
    "to what is in the file, or do two parts lie at one place? Offsets are in bytes, of whole arrays.",
    "overwritten": "The parts that are given have to stay as they are: training goes on with them.",
    "text_order": "As text step_9 comes after step_10: compare steps as numbers.",
    "stranger": "There are other files in the folder, such as those that a killed save has left. A checkpoint is what "
    "has exactly the name of one.",
    "older_gone": "The older checkpoint is gone. It is what is left if the new one is damaged; save leaves it alone.",
    "misnamed": 'A checkpoint\'s name is f"step_{step}.ckpt" in the folder, from the end of save on.',
    "no_checksum": "Damage goes unnoticed. Each rank can take a checksum (zlib.crc32) of what it writes; the file "
    "keeps them, and newest compares.",
    "checksum_part": "Some bytes are under no checksum: all that a rank writes counts, each array, and the table of "
    "names, lengths and checksums as well.",
    "cut_unnoticed": "A file that was cut is taken for whole.",
    "unnoticed": "newest notices the damage, and load does not.",
    "damage_raises": "What is damaged is passed over, not an error: any number in the file may be wrong, lengths and "
    "offsets, too, and the file may be empty.",
    "none_there": "If no checkpoint is whole, newest returns None and load raises FileNotFoundError, on all ranks.",
    "gathered": "A rank's part is written by another one. Send no arrays: each rank writes its own part at its offset "
    "with os.pwrite.",
    "in_turn": "The ranks write one after another. They write to different places of one file: all at once.",
    "scratch": "A rank asks for much more memory than its part has. Is anything gathered, or a whole file read at once "
    "to take its checksum? Read it in pieces.",
    "ignored": "A call failed, as on a full disk, and save ends as if all were well. An error must not get lost.",
    "alone": "A rank has an error and the others do not hear of it. Catch it, tell all (allgather), then all raise "
    "together. Renaming may fail as well.",
    "short_write": "os.pwrite may write less than it was given (a full disk, a signal, 2 GiB); it returns how much. "
    "Go on until all is written.",
    "renamed_early": "The file gets its name before all is in it: rename once all ranks have said that they are done.",
    "no_temporary": "A half-written file has the name of a checkpoint. Write under another name, and rename it at the "
    "end: that is one step, which happens or does not.",
    "lost": "Neither the new checkpoint nor an older one can be loaded. What was there has to stay until the new one "
    "is whole, even if the step is saved again.",
    "returned_early": "save returns on one rank before the file has its name. If the others die now, that rank "
    "believes in a checkpoint that is not there: meet once more at the end.",
    "leftover": "What a killed save leaves must not hinder the next one of that step: neither make it fail, nor get "
    "into its file.",
    "not_truncated": "A longer file was left by a killed save, and its end is still there: open with O_TRUNC on one "
    "rank before the others write.",
    "not_synced": "The name can reach the disk before the content does: each rank has to os.fsync the file after its "
    "writes (a rank's sync reaches what this rank has written), and the rename comes after all of them.",
    "folder_not_synced": "The rename itself is in memory only. Open the folder (os.O_RDONLY) and os.fsync it, after "
    "the rename.",
    "resumed": "The run goes on with other bits than it would have had: what does a rank need to go on, and is it all "
    "in the file?",
    "slow": "Right, but slow beside our writer. Are all ranks writing at once, in large pieces, and is the disk waited "
    "for once?",
    "forbidden": "Write by os.open, os.write, os.pwrite, os.ftruncate, os.fsync, os.rename, os.replace; of the "
    "communicator use barrier, bcast, gather, allgather, reduce, allreduce, scan, exscan.",
}
