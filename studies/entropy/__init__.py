"""What each entropy control does to entropy, reward and diversity, through the real trainer.

python -m studies.entropy run        # resumable; --help says how to run a part of it
python -m studies.entropy report     # figures and tables of what is finished, for docs/study-entropy.md
"""
