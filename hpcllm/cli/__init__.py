"""The commands, one file each, with its options, its call and its printing.

main.py picks the file by the command's name and says how a process ends; options.py has what several commands share.
"""
