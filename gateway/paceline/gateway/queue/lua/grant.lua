-- ARGV: now, lease ms, workers as JSON [[id, sequences, kv tokens, weight], ...]. Returns the number granted.
-- Strict order (class priority, then the least served tenant, then deadline): a request that fits nowhere
-- holds those behind it, so that a large one is never starved by small ones.
local lease = tonumber(ARGV[2])
local workers = {}
local by_id = {}
local most_sequences, most_kv_tokens = 0, 0
for _, w in ipairs(cjson.decode(ARGV[3])) do
  local worker = {id = w[1], sequences = w[2], kv_tokens = w[3], weight = w[4], total = w[2]}
  table.insert(workers, worker)
  most_sequences = math.max(most_sequences, worker.sequences)
  most_kv_tokens = math.max(most_kv_tokens, worker.kv_tokens)
  by_id[w[1]] = worker
end
for _, id in ipairs(redis.call('ZRANGE', key('leases'), '(' .. now, '+inf', 'BYSCORE')) do
  local row = redis.call('HMGET', key('req', id), 'verifier', 'sequences', 'kv_tokens')
  local worker = row[1] and by_id[row[1]]
  if worker then
    worker.sequences = worker.sequences - tonumber(row[2])
    worker.kv_tokens = worker.kv_tokens - tonumber(row[3])
  end
end

local function choose(sequences, kv_tokens, avoid)
  local best, best_score
  for _, w in ipairs(workers) do
    if w.sequences >= sequences and w.kv_tokens >= kv_tokens and w.weight > 0 then
      -- The most free weighted capacity; the one to avoid only if there is no other.
      local score = w.weight * w.sequences / w.total
      if w.id == avoid then score = score - 1000000 end
      if not best or score > best_score then best, best_score = w, score end
    end
  end
  return best
end

-- Waits that are over end first, wherever they stand in line (a score of 0 is a request given back).
for _, class in ipairs(redis.call('ZRANGE', key('classes'), 0, -1)) do
  for _, tenant in ipairs(redis.call('ZRANGE', key('tenants', class), 0, -1)) do
    for _, id in ipairs(redis.call('ZRANGE', key('q', class, tenant), '(0', now, 'BYSCORE')) do
      local owner = redis.call('HGET', key('req', id), 'owner')
      leave_line(id, class, tenant)
      redis.call('DEL', key('req', id))
      if owner then tell(owner, id, '', 0) end
    end
  end
end

local granted = 0
while true do
  local class = redis.call('ZRANGE', key('classes'), 0, 0)[1]
  if not class then break end
  local tenant = redis.call('ZRANGE', key('tenants', class), 0, 0)[1]
  local id = tenant and redis.call('ZRANGE', key('q', class, tenant), 0, 0)[1]
  if not id then
    redis.call('ZREM', key('classes'), class)
  else
    local row = redis.call('HMGET', key('req', id), 'owner', 'sequences', 'kv_tokens', 'avoid')
    local owner = row[1]
    if not owner or redis.call('EXISTS', key('owner', owner)) == 0 then
      leave_line(id, class, tenant)
      redis.call('DEL', key('req', id))
    else
      -- What no live worker could ever hold takes a whole one: it must not block the line for good.
      local sequences = math.min(tonumber(row[2]), most_sequences)
      local kv_tokens = math.min(tonumber(row[3]), most_kv_tokens)
      local worker = choose(sequences, kv_tokens, row[4])
      if not worker then break end
      leave_line(id, class, tenant)
      charge(class, tenant, tonumber(row[3]))
      local epoch = redis.call('HINCRBY', key('req', id), 'epoch', 1)
      redis.call('HSET', key('req', id), 'state', 'leased', 'verifier', worker.id)
      redis.call('PEXPIRE', key('req', id), lease + KEEP_MS)
      redis.call('ZADD', key('leases'), now + lease, id)
      tell(owner, id, worker.id, epoch)
      worker.sequences = worker.sequences - sequences
      worker.kv_tokens = worker.kv_tokens - kv_tokens
      granted = granted + 1
    end
  end
end
return granted
