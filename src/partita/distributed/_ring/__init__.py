"""The ring: keys of all ranks pass by every rank's rows, in blocks.

group           a process group seen from one rank; sums over ranks with the right gradients
handshake       what the ranks tell each other before a call, and the errors if they disagree
layout          which positions of a sequence a rank holds
blocks          how blocks are cut, so that little is held on the way
communication   blocks and their gradients on their way; `traffic` counts the bytes
tiles           one pass as the engine sees it: rows of this rank against a part of a block
forward         states added up as the blocks come
backward        the blocks go round again, and their gradients go home with them
autograd        both as one differentiable function
distribution    the distribution of this rank's rows over the keys of all ranks
count           how many keys score above a level
merge           states of disjoint keys, one on every rank
"""
