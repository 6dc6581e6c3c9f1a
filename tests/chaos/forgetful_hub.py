"""A hub whose journal loses the rounds it is told to keep: a law has to break."""

import sys

from chaos import hub
from edgetrain.exchange.hub.journal import Journal
from edgetrain.exchange.hub.records import Round

append = Journal.append


def forget(journal, record):
    if not isinstance(record, Round) or record.round < 5:
        append(journal, record)


Journal.append = forget

if __name__ == "__main__":
    sys.exit(hub.main(sys.argv[1:]))
