"""From a fleet on paper to devices that train by themselves: cards, later SSH.

Stands above jobs and keys. Nothing that trains may need it.

`keeper` and `onsite` run on the devices themselves, sent along with each call (`calling`), and know
nothing of this package but `cards.first_boot`.

Doors: cards.archive, cards.disks, cards.example, cards.flashing, cards.looking, cards.making,
cards.writing, desk, in_job, outfit, provision, reaching, sets.
"""
