#!/bin/bash
set +e
{
echo pi-0 > /etc/hostname
sed -i 's/127\.0\.1\.1.*/127.0.1.1\tpi-0/' /etc/hosts
systemctl disable userconfig 2> /dev/null
id fleet 2> /dev/null || useradd -m -s /bin/bash fleet
passwd -l fleet > /dev/null
for group in users sudo video; do usermod -aG $group fleet; done
install -d -m 0700 -o fleet -g fleet /home/fleet/.ssh
install -D -m 0600 /dev/stdin /home/fleet/.ssh/authorized_keys << 'EDGETRAIN'
ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f me@host
EDGETRAIN
chown fleet:fleet /home/fleet/.ssh/authorized_keys
install -D -m 0440 /dev/stdin /etc/sudoers.d/010_fleet << 'EDGETRAIN'
fleet ALL=(ALL) NOPASSWD: ALL
EDGETRAIN
install -D -m 0644 /dev/stdin /etc/ssh/sshd_config.d/10-edgetrain.conf << 'EDGETRAIN'
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
EDGETRAIN
install -D -m 0644 /dev/stdin /etc/NetworkManager/conf.d/10-edgetrain.conf << 'EDGETRAIN'
[connection]
wifi.powersave = 2
EDGETRAIN
install -D -m 0644 /dev/stdin /etc/systemd/system/edgetrain-first-boot.service << 'EDGETRAIN'
[Unit]
Description=edgetrain first boot: unpack the worker, make keys, enrol
RequiresMountsFor=/boot/firmware
ConditionPathExists=/boot/firmware/edgetrain/config.json
ConditionPathExists=!/var/lib/edgetrain-setup/done
# It sends the SSH host key: not the one that the image makes anew at its first boot.
After=regenerate_ssh_host_keys.service sshd-keygen.service
# It unpacks once the root file system has its size, whatever enlarges it.
After=systemd-growfs-root.service rpi-resize.service resize2fs_once.service
After=cloud-init.service cloud-init-network.service
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart=/usr/bin/python3 /boot/firmware/edgetrain/first_boot.py
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2

[Install]
WantedBy=multi-user.target
EDGETRAIN
systemctl enable ssh
install -D -m 0600 /dev/stdin /etc/NetworkManager/system-connections/edgetrain-wifi.nmconnection << 'EDGETRAIN'
[connection]
id=edgetrain-wifi
type=wifi

[wifi]
mode=infrastructure
ssid=108;97;98;32;38;32;39;99;111;39;

[wifi-security]
key-mgmt=wpa-psk
psk=29fa72bf230b9fcecbd4acbcdd70fcefe2982fcc8479ae003420c19596720963

[ipv4]
method=auto
EDGETRAIN
rfkill unblock wifi
[ -x /usr/bin/raspi-config ] && raspi-config nonint do_wifi_country DE
ln -sf /etc/systemd/system/edgetrain-first-boot.service /etc/systemd/system/multi-user.target.wants/edgetrain-first-boot.service
sed -i 's| systemd\.[^ ]*||g' /boot/firmware/cmdline.txt
sync
shred --iterations=0 --zero --remove=unlink /boot/firmware/firstrun.sh
sync
exit 0
}
