-- owner, lease_ms, then for each lease: id, verifier, epoch, sequences, kv_tokens, class, priority, tenant, wait_ms
local owner, lease_ms = ARGV[2], tonumber(ARGV[3])
touch_owner(owner, lease_ms)
for i = 4, #ARGV, 9 do
  local id, verifier, epoch = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2])
  local known = load(id)
  local stale = redis.call('ZSCORE', ENDED, id)
    or known and (known.owner ~= owner or tonumber(known.epoch or '0') > epoch)
  if not stale then
    if known and known.state == 'queued' then
      take_waiting(id, known) -- it lapsed, but its owner was only late
    elseif known and known.state == 'reserved' then
      redis.call('ZREM', RESERVED, id)
    end
    local request = {verifier = verifier, seqs = ARGV[i + 3], kv = ARGV[i + 4]}
    redis.call('HSET', key('req', id), 'state', 'leased', 'owner', owner, 'verifier', verifier,
      'epoch', int(epoch), 'seqs', request.seqs, 'kv', request.kv, 'class', ARGV[i + 5],
      'priority', ARGV[i + 6], 'tenant', ARGV[i + 7], 'wait_ms', ARGV[i + 8], 'retry', '0', 'lapses', 0,
      'charged', known and known.charged or 0, 'avoid', known and known.avoid or '')
    put_lease(id, request, lease_ms)
  end
end
return 'ok'
